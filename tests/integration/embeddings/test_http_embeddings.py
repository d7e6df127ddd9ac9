"""POST /v1/embeddings: OpenAI's forms, versions, the cache and lost workers, against a real (tiny) encoder."""

from __future__ import annotations

import asyncio
import base64
import dataclasses

import aiohttp
import numpy as np
import openai
from tokenizers import Tokenizer

from pdbus.errors import Overloaded
from pdbus.messages.prefill import MOST_TEXTS
from tests.support.encoder_rig import MODEL, EncoderRig, ask, encoder_rig
from tests.support.router_rig import until
from tests.support.workers import LocalSource

TEXTS = ["the quick brown fox", "a red apple", "numbers 1 2 3"]


def expected(r: EncoderRig, texts: list[str], version: str = "a") -> np.ndarray:
    """Computed alone, without any bus."""
    encoder = r.workers[0]._versions.get(r.source.root_of[version])
    assert encoder
    tokenizer = Tokenizer.from_buffer(r.source._checkpoints[encoder.root].meta["tokenizer.json"])
    return np.concatenate([encoder.encoder.embed([tokenizer.encode(text).ids]) for text in texts])


async def test_the_official_client_gets_the_model_s_vectors(client: openai.AsyncOpenAI, r: EncoderRig):
    answer = await client.embeddings.create(model=MODEL, input=TEXTS)  # asks for base64
    assert answer.object == "list"
    assert answer.model == MODEL
    assert [item.index for item in answer.data] == [0, 1, 2]
    assert {item.object for item in answer.data} == {"embedding"}
    assert np.array_equal(np.array([item.embedding for item in answer.data], np.float32), expected(r, TEXTS))
    assert answer.usage.prompt_tokens == answer.usage.total_tokens > len(TEXTS) * 2
    floats = await client.embeddings.create(model=MODEL, input=TEXTS[0], encoding_format="float")
    assert np.array_equal(np.array(floats.data[0].embedding, np.float32), expected(r, TEXTS)[0])


async def test_every_form_of_input(http: aiohttp.ClientSession, r: EncoderRig):
    ids = (
        Tokenizer.from_buffer(r.source._checkpoints[r.source.root_of["a"]].meta["tokenizer.json"]).encode(TEXTS[0]).ids
    )
    for form in (TEXTS[0], [TEXTS[0]], ids, [ids]):
        status, answer, _ = await ask(http, input=form)
        assert status == 200
        assert np.array_equal(np.array(answer["data"][0]["embedding"], np.float32), expected(r, TEXTS)[0])
        assert answer["usage"]["prompt_tokens"] == len(ids)
    assert r.texts == 1, "all of them are the same tokens"


async def test_base64_is_fp32_in_little_endian_order(http: aiohttp.ClientSession, r: EncoderRig):
    _, answer, _ = await ask(http, input=TEXTS, encoding_format="base64", dimensions=32, user="me")
    told = np.stack([np.frombuffer(base64.b64decode(item["embedding"]), "<f4") for item in answer["data"]])
    assert np.array_equal(told, expected(r, TEXTS))


async def test_an_answer_names_its_version_and_versions_can_be_asked_for(http: aiohttp.ClientSession, r: EncoderRig):
    b = r.source.root_of["b"]
    for name in (f"{MODEL}@{b.hex()[:10]}", f"{MODEL}@root-{b.hex()}"):
        status, answer, _ = await ask(http, model=name, input=TEXTS)
        assert status == 200
        assert (answer["model"], answer["system_fingerprint"]) == (name, f"root-{b.hex()}")
        assert np.array_equal(np.array([d["embedding"] for d in answer["data"]], np.float32), expected(r, TEXTS, "b"))


async def test_a_new_version_s_vectors_come_at_once_and_the_old_ones_again_after_a_rollback(
    http: aiohttp.ClientSession, r: EncoderRig
):
    roots = r.source.root_of
    seen = []
    for version in ("a", "b", "a"):
        r.versions.move("stable", roots[version])
        _, answer, cache = await ask(http, input=TEXTS)
        await r.until_written()
        assert answer["system_fingerprint"] == f"root-{roots[version].hex()}"
        told = np.array([item["embedding"] for item in answer["data"]], np.float32)
        assert np.array_equal(told, expected(r, TEXTS, version))
        seen.append(cache)
    assert seen == ["hits=0, misses=3", "hits=0, misses=3", "hits=3, misses=0"]


async def test_only_what_is_missing_is_computed_in_one_lookup(http: aiohttp.ClientSession, r: EncoderRig):
    await ask(http, input=TEXTS[:2])
    await r.until_written()
    r.entries.gets.clear()
    _, answer, cache = await ask(http, input=[*TEXTS, *TEXTS])
    assert cache == "hits=4, misses=2"
    assert r.entries.gets == [3]
    assert [len(message.texts) for message in r.workers[0].asked] == [2, 1]
    told = np.array([item["embedding"] for item in answer["data"]], np.float32)
    assert np.array_equal(told, expected(r, [*TEXTS, *TEXTS]))


async def test_what_a_caller_may_say_of_the_cache(http: aiohttp.ClientSession, r: EncoderRig):
    for header, stored, texts in (("no-store", 0, 1), ("no-store", 0, 2), ("no-cache", 1, 3), ("no-cache", 1, 4)):
        await ask(http, {"Cache-Control": header}, input=TEXTS[0])
        await r.until_written()
        assert (len(r.entries.stored), r.texts) == (stored, texts)
    _, _, cache = await ask(http, {"Cache-Control": "max-age=7"}, input=TEXTS[0])
    assert cache == "hits=1, misses=0"
    assert r.entries.max_ages[-1] == 7


async def test_requests_for_the_same_text_at_once_have_it_computed_once(http: aiohttp.ClientSession, r: EncoderRig):
    gate = r.workers[0].hold = asyncio.Event()
    asking = [asyncio.create_task(ask(http, input=[TEXTS[0], TEXTS[at % 3]])) for at in range(9)]
    await until(lambda: r.texts == 3)
    gate.set()
    answers = await asyncio.gather(*asking)
    assert {status for status, _, _ in answers} == {200}
    assert r.texts == 3


async def test_one_who_leaves_takes_nothing_from_those_who_wait_for_the_same(
    http: aiohttp.ClientSession, r: EncoderRig
):
    gate = r.workers[0].hold = asyncio.Event()
    first = asyncio.create_task(ask(http, input=TEXTS[0]))
    await until(lambda: r.texts > 0)
    second = asyncio.create_task(ask(http, input=TEXTS[0]))
    await until(lambda: r.waiting == 2)
    first.cancel()
    await until(lambda: r.router.frontend.admission.running == 1)
    gate.set()
    assert (await second)[0] == 200
    assert r.texts == 1


async def test_what_nobody_waits_for_any_more_is_given_up(http: aiohttp.ClientSession, r: EncoderRig):
    gate = r.workers[0].hold = asyncio.Event()
    status, answer, _ = await ask(http, {"X-Request-Timeout-Ms": "150"}, input=TEXTS)
    assert (status, answer["error"]["code"]) == (504, "deadline_exceeded")
    await until(lambda: r.router.features.idle)
    gate.set()


async def test_many_inputs_go_in_pieces_to_all_workers(encoders: LocalSource):
    async with encoder_rig(encoders, workers=2) as r, aiohttp.ClientSession(r.url) as http:
        texts = [[5 + at % 100, 5 + at // 100, 7] for at in range(5 * MOST_TEXTS)]
        status, answer, _ = await ask(http, input=texts)
        assert status == 200
        assert len(answer["data"]) == len(texts)
        assert max(len(message.texts) for worker in r.workers for message in worker.asked) <= MOST_TEXTS
        assert all(worker.texts for worker in r.workers)
        version = r.workers[0]._versions.get(encoders.root_of["a"])
        assert version
        for at in (0, 77, 319):
            alone = version.encoder.embed([texts[at]])[0]
            assert np.array_equal(np.array(answer["data"][at]["embedding"], np.float32), alone)


async def test_another_worker_takes_over(encoders: LocalSource):
    async with encoder_rig(encoders, workers=2) as r, aiohttp.ClientSession(r.url) as http:
        r.workers[0].refuse = Overloaded("full")
        at = 0
        while not r.workers[0].asked:  # of two idle ones either may be asked first
            status, _, _ = await ask(http, input=[[5 + at % 100, 5 + at // 100, 7]])
            assert status == 200
            at += 1


async def test_a_worker_that_dies_in_its_work_is_noticed(encoders: LocalSource):
    async with encoder_rig(encoders, workers=2) as r, aiohttp.ClientSession(r.url) as http:
        for worker in r.workers:
            worker.hold = asyncio.Event()
        asking = asyncio.create_task(ask(http, input="a red apple"))
        await until(lambda: r.texts > 0)
        at = 0 if r.workers[0].asked else 1
        other = r.workers[1 - at].hold
        assert other
        other.set()
        await r.lives[at].aclose()
        assert (await asking)[0] == 200


async def test_vectors_of_another_version_or_size_are_not_taken(http: aiohttp.ClientSession, r: EncoderRig):
    worker = r.workers[0]
    for change in ({"root": bytes(32)}, {"vectors": (b"1234",)}, {"compute_class": "another"}, {"vectors": ()}):
        worker.tamper = lambda reply, change=change: dataclasses.replace(reply, **change)
        status, _, _ = await ask(http, {"X-Request-Timeout-Ms": "300"}, input="a red apple")
        assert status == 504
    assert not r.entries.stored


async def test_an_entry_that_can_t_be_one_is_computed_anew(http: aiohttp.ClientSession, r: EncoderRig):
    await ask(http, input=TEXTS[0])
    await r.until_written()
    for broken in (b"not msgpack", b""):
        ((key, (root, material, _, name)),) = r.entries.stored.items()
        r.entries.stored[key] = (root, material, broken, name)
        status, answer, cache = await ask(http, input=TEXTS[0])
        await r.until_written()
        assert (status, cache) == (200, "hits=0, misses=1")
        assert np.array_equal(np.array(answer["data"][0]["embedding"], np.float32), expected(r, TEXTS)[0])


async def test_without_cache_nodes_it_serves_all_the_same(http: aiohttp.ClientSession, r: EncoderRig):
    r.entries.down = True
    for _ in range(2):
        assert (await ask(http, input=TEXTS))[0] == 200
    assert r.texts == 6


async def test_it_is_ready_with_a_prefill_worker_alone_and_the_document_tells_of_it(
    http: aiohttp.ClientSession, r: EncoderRig
):
    async with http.get("/readyz") as answer:
        assert answer.status == 200
    async with http.get("/openapi.json") as answer:
        told = await answer.json()
    operation = told["paths"]["/v1/embeddings"]["post"]
    assert operation["requestBody"]["content"]["application/json"]["schema"] == {
        "$ref": "#/components/schemas/EmbeddingBody"
    }
    assert "EmbeddingList" in told["components"]["schemas"]
    await r.lives[0].aclose()
    await until(lambda: bool(r.router.why_not_ready()))
    async with http.get("/readyz") as answer:
        assert answer.status == 503
        assert (await answer.json())["detail"] == "no prefill worker is ready for the current version"
