"""The prefill worker of an encoder, on the twin and on a real server."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import contextmanager

import numpy as np
import pytest
import torch

from pdbus.context import Deadline, RequestContext
from pdbus.engine.encoder_versions import EncoderVersions
from pdbus.errors import DeadlineExceeded, InvalidRequest, PdbusError, RootGone, TooLarge, Unavailable
from pdbus.messages.prefill import MOST_TEXTS, Embed
from pdbus.messages.presence import Card
from pdbus.model.checkpoint import open_checkpoint
from pdbus.model.encoder import Encoder
from pdbus.prefill.encoder_worker import EncoderWorker, together
from pdbus.subjects import PREFILL_EMBED
from tests.support.asking import until
from tests.support.checkpoints import tiny_checkpoint
from tests.support.encoders import MOST_TOKENS, VOCAB_SIZE, tiny_encoder
from tests.support.workers import LocalSource, NewBus


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> LocalSource:
    folder = tmp_path_factory.mktemp("encoders")
    checkpoints = {name: open_checkpoint(tiny_encoder(folder / name, seed=seed)) for seed, name in enumerate("ab", 1)}
    checkpoints["writes"] = open_checkpoint(tiny_checkpoint(folder, "llama"))
    return LocalSource(checkpoints)


class Asked:
    """A worker and somebody who asks it."""

    def __init__(self, bus, worker: EncoderWorker, versions: EncoderVersions, id_: str, source: LocalSource) -> None:
        self.bus, self.worker, self.versions, self.id, self.source = bus, worker, versions, id_, source

    async def embed(self, *texts: tuple[int, ...], version: str = "a", seconds: float = 60, model: str = "m"):
        message = Embed(model, self.source.root_of[version], texts)
        return await self.bus.call(PREFILL_EMBED(worker=self.id), message, RequestContext.after(seconds))

    def alone(self, *texts: tuple[int, ...], version: str = "a") -> tuple[bytes, ...]:
        loaded = self.versions.get(self.source.root_of[version])
        assert loaded
        return tuple(loaded.encoder.embed([text])[0].tobytes() for text in texts)


@pytest.fixture
async def asked(new_bus: NewBus, source: LocalSource, unique: Callable[[str], str]) -> AsyncIterator[Asked]:
    torch.set_num_threads(1)
    id_ = unique("encoder")
    async with new_bus() as bus, new_bus() as other, EncoderVersions(source, "cpu") as versions:
        versions.want([source.root_of["a"]])
        await versions.first()
        async with EncoderWorker(bus, id_, "m", versions, 1) as worker:
            yield Asked(other, worker, versions, id_, source)
        assert worker.load().running == worker.load().waiting == 0


@contextmanager
def held(asked: Asked) -> Iterator[None]:
    """The worker's thread does nothing for anybody until the scope is left."""
    gate = threading.Event()
    asked.worker._thread.submit(gate.wait)
    try:
        yield
    finally:
        gate.set()


async def test_other_versions_than_before_are_told_at_once(source: LocalSource):
    changes = 0

    def on_change() -> None:
        nonlocal changes
        changes += 1

    async with EncoderVersions(source, "cpu", on_change) as versions:
        versions.want([source.root_of["a"]])
        await versions.first()
        assert changes == 1
        versions.want([source.root_of["b"]])
        await until(lambda: versions.roots == (source.root_of["b"],))
        assert changes == 3, "one came, and one went"


async def test_vectors_come_in_the_order_of_the_texts(asked: Asked):
    texts = [tuple(range(5, 5 + length)) for length in (9, 3, MOST_TOKENS, 3, 1, 9)]
    reply = await asked.embed(*texts)
    assert reply.vectors == asked.alone(*texts)
    assert (reply.root, reply.worker) == (asked.source.root_of["a"], asked.id)
    assert reply.compute_class == asked.versions.compute_class
    assert np.isfinite(np.frombuffer(reply.vectors[0], "<f4")).all()


async def test_a_version_that_a_request_names_is_loaded(asked: Asked):
    assert (await asked.embed((5, 6), version="b")).vectors == asked.alone((5, 6), version="b")


async def test_a_version_that_it_can_t_have_is_said_to_be_gone(asked: Asked):
    with pytest.raises(RootGone):
        await asked.embed((5, 6), version="writes")
    assert "gives no embeddings" in asked.versions.detail


@pytest.mark.parametrize(
    ("texts", "error"),
    [
        ([], InvalidRequest),
        ([()], InvalidRequest),
        ([(5,)] * (MOST_TEXTS + 1), InvalidRequest),
        ([(5,) * (MOST_TOKENS + 1)], TooLarge),
        ([(VOCAB_SIZE,)], InvalidRequest),
        ([(-1,)], InvalidRequest),
    ],
)
async def test_what_it_can_t_compute_is_refused(asked: Asked, texts: list[tuple[int, ...]], error: type[PdbusError]):
    with pytest.raises(error):
        await asked.embed(*texts)


async def test_another_model_s_request_is_refused(asked: Asked):
    with pytest.raises(InvalidRequest, match="this worker serves m"):
        await asked.embed((5,), model="other")


async def test_requests_wait_for_each_other_and_one_that_is_given_up_ends_soon(asked: Asked):
    big = [(5 + at % 100,) * MOST_TOKENS for at in range(MOST_TEXTS)]
    with held(asked):
        many = [asyncio.create_task(asked.embed(*big)) for _ in range(6)]
        await until(lambda: asked.worker.load().waiting > 0)
        with pytest.raises(DeadlineExceeded):
            await asked.embed(*big, seconds=0.005)
    assert len({reply.vectors for reply in await asyncio.gather(*many)}) == 1
    await until(lambda: asked.worker.load().running == 0)


async def test_draining_finishes_what_it_has_and_takes_nothing_new(asked: Asked):
    big = [(5 + at % 100,) * MOST_TOKENS for at in range(MOST_TEXTS)]
    with held(asked):
        running = asyncio.create_task(asked.embed(*big))
        await until(lambda: asked.worker.load().running > 0)
        await asked.worker.stop_intake()
        with pytest.raises(Unavailable):
            await asked.embed((5, 6))
    await asked.worker.drain(Deadline.after(30))
    assert len((await running).vectors) == MOST_TEXTS


async def test_its_card_says_that_it_embeds(asked: Asked):
    await asked.embed((5, 6))
    card = asked.worker.card(Card("prefill", asked.id, "i", 1, "ready", "m"))
    assert card.embeds
    assert card.state == "ready"
    assert card.roots == asked.versions.roots
    assert card.progress > 0
    assert "encoder" in card.compute_class


def test_texts_of_one_length_are_computed_together():
    lengths = [3, 5, 3, *[5] * 20, 1]
    groups = list(together([(0,) * length for length in lengths]))
    assert sorted(at for group in groups for at in group) == list(range(len(lengths)))
    assert all(len({lengths[at] for at in group}) == 1 and len(group) <= 16 for group in groups)
    assert len(groups) == 4


async def test_texts_that_fail_are_no_hanging(asked: Asked, monkeypatch: pytest.MonkeyPatch) -> None:
    """Else the process would be given up some seconds later, with all that it could still answer."""

    def fail(encoder: Encoder, texts: object) -> np.ndarray:
        raise MemoryError

    with monkeypatch.context() as failing:
        failing.setattr(Encoder, "embed", fail)
        with pytest.raises(PdbusError):
            await asked.embed((1, 2, 3))
    assert asked.worker.progress.waits
    assert await asked.embed((1, 2, 3)) is not None
