"""`pd.v1.embed.<model>` and `client.embed`."""

from __future__ import annotations

import numpy as np
import pytest

from pdbus.client import Client
from pdbus.context import RequestContext
from pdbus.errors import InvalidRequest, NotFound, TooLarge
from pdbus.messages.prefill import Embedded
from pdbus.messages.router import EmbedRequest
from pdbus.router.embed import MOST_BYTES
from pdbus.subjects import EMBED
from tests.support.encoder_rig import MODEL, EncoderRig

TEXTS = [(5 + at % 150, 5 + at // 150, 7) for at in range(300)]


def alone(r: EncoderRig, root: bytes) -> np.ndarray:
    version = r.workers[0]._versions.get(root)
    assert version
    return np.concatenate([version.encoder.embed([ids]) for ids in TEXTS])


@pytest.fixture
def client(r: EncoderRig) -> Client:
    return Client(r.bus, MODEL, timeout_s=20)


async def test_many_texts_are_embedded_in_their_order_on_one_version(client: Client, r: EncoderRig):
    first = await client.embed(TEXTS)
    await r.until_written()
    assert first.vectors.shape == (300, 32)
    assert first.vectors.dtype == np.float32
    assert first.root == r.source.root_of["a"]
    assert (first.hits, r.texts) == (0, 300)
    assert np.array_equal(first.vectors, alone(r, first.root))
    again = await client.embed([*TEXTS, "a fox"])
    assert (again.hits, r.texts) == (300, 301)
    assert np.array_equal(again.vectors[:300], first.vectors)
    assert again.tokens > first.tokens == 900


async def test_a_ref_that_moves_in_between_mixes_no_versions(client: Client, r: EncoderRig):
    worker, roots = r.workers[0], r.source.root_of

    def move(reply: Embedded) -> Embedded:
        r.versions.move("stable", roots["ab"[len(worker.asked) % 2]])
        return reply

    worker.tamper = move
    found = await client.embed(TEXTS, cache_control="no-store")
    assert len({message.root for message in worker.asked}) == 1
    assert np.array_equal(found.vectors, alone(r, found.root))


async def test_refs_and_cache_control(client: Client, r: EncoderRig):
    b = r.source.root_of["b"]
    found = await client.embed(["a fox"], ref=b.hex()[:12])
    assert found.root == b
    assert (await Client(r.bus, f"{MODEL}@{b.hex()}").embed(["a fox"])).root == b
    await r.until_written()
    stored = len(r.entries.stored)
    await client.embed(["a pear"], cache_control="no-store")
    await r.until_written()
    assert len(r.entries.stored) == stored


async def test_refusals(client: Client, r: EncoderRig):
    with pytest.raises(InvalidRequest, match="no input"):
        await client.embed([])
    with pytest.raises(InvalidRequest, match="empty"):
        await client.embed(["a", ""])
    with pytest.raises(TooLarge, match="takes 40 at most"):
        await client.embed(["fox " * 50])
    with pytest.raises(NotFound):
        await client.embed(["a"], ref="nothing")
    many = EmbedRequest(tuple((5 + at % 100, 5 + at // 100) for at in range(2048)))
    assert MOST_BYTES > 2048 * 32 * 4
    reply = await r.bus.call(EMBED(model=MODEL), many, RequestContext.after(30))
    assert len(reply.vectors) == 2048 * reply.dimensions * 4
