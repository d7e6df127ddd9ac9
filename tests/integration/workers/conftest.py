"""Two versions of a tiny model, and workers on the in-memory twin and on a real server."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Iterator

import pytest

from pdbus.bus.bus import connect, memory_bus
from pdbus.bus.memory import MemoryBroker
from pdbus.model.backend import Model
from pdbus.model.backends import BackendOptions, EngineName, open_backend
from pdbus.model.checkpoint import Checkpoint, open_checkpoint
from pdbus.native.build import levels
from tests.support.checkpoints import tiny_checkpoint
from tests.support.workers import LocalSource, NewBus, Rig, rig

needs_native = pytest.mark.skipif(not levels(), reason="no kernels for this processor")


@pytest.fixture(scope="session")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Checkpoint]:
    folder = tmp_path_factory.mktemp("versions")
    return {
        name: open_checkpoint(tiny_checkpoint(folder / name, "llama", seed=seed))
        for seed, name in enumerate(("a", "b"), 1)
    }


@pytest.fixture(scope="session")
def source(checkpoints: dict[str, Checkpoint]) -> LocalSource:
    return LocalSource(checkpoints)


@pytest.fixture(scope="session", params=["torch", pytest.param("native", marks=needs_native)])
def engine(request: pytest.FixtureRequest) -> EngineName:
    """The same is promised of both."""
    return request.param  # type: ignore[no-any-return]


@pytest.fixture(scope="session")
def model(checkpoints: dict[str, Checkpoint], engine: EngineName) -> Iterator[Model]:
    """Version a, to compute answers alone."""
    yield from alone(checkpoints["a"], engine)


@pytest.fixture(scope="session")
def other_model(checkpoints: dict[str, Checkpoint], engine: EngineName) -> Iterator[Model]:
    """Version b."""
    yield from alone(checkpoints["b"], engine)


def alone(checkpoint: Checkpoint, engine: EngineName) -> Iterator[Model]:
    backend = open_backend(BackendOptions(engine, "fp32", "fp32"), checkpoint.config)
    yield backend.build(checkpoint.config, {}, dict(checkpoint.tensors()), None)
    backend.close()


@pytest.fixture(autouse=True)
def patience(monkeypatch: pytest.MonkeyPatch) -> None:
    """A cache node that took two seconds on a busy machine would be done without, and cost a test its hit."""
    monkeypatch.setattr("pdbus.engine.prefix_tier._LONGEST_S", 60.0)


@pytest.fixture
def twin() -> NewBus:
    """Buses on one in-memory broker."""
    broker = MemoryBroker()
    return lambda: memory_bus(broker)


@pytest.fixture(params=["twin", "real"])
def new_bus(request: pytest.FixtureRequest) -> NewBus:
    """The same is promised on both."""
    if request.param == "twin":
        broker = MemoryBroker()
        return lambda: memory_bus(broker)
    url = request.getfixturevalue("nats_url")
    return lambda: connect(url, name="test-worker")


@pytest.fixture
async def workers(
    new_bus: NewBus, source: LocalSource, unique: Callable[[str], str], engine: EngineName
) -> AsyncIterator[Rig]:
    async with rig(new_bus, source, name=unique("tiny"), engine=engine) as made:
        yield made
        await made.until_idle()
