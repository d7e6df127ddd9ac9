"""Two versions of a tiny model, and workers on the in-memory twin and on a real server."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable

import pytest

from pdbus.bus.bus import connect, memory_bus
from pdbus.bus.memory import MemoryBroker
from pdbus.model.checkpoint import Checkpoint, open_checkpoint
from pdbus.model.llama import Llama
from tests.support.checkpoints import tiny_checkpoint
from tests.support.llama import load
from tests.support.workers import LocalSource, NewBus, Rig, rig


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


@pytest.fixture(scope="session")
def model(checkpoints: dict[str, Checkpoint]) -> Llama:
    """Version a, to compute answers alone."""
    return load(checkpoints["a"])


@pytest.fixture(scope="session")
def other_model(checkpoints: dict[str, Checkpoint]) -> Llama:
    """Version b."""
    return load(checkpoints["b"])


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
async def workers(new_bus: NewBus, source: LocalSource, unique: Callable[[str], str]) -> AsyncIterator[Rig]:
    async with rig(new_bus, source, name=unique("tiny")) as made:
        yield made
        await made.until_idle()
