"""An embedding model as a user starts it: `pdbus up --model` with the real all-MiniLM-L6-v2."""

from __future__ import annotations

import asyncio
import json
import re
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

import msgpack
import nats
import numpy as np
import openai
import pytest
from tokenizers import Tokenizer

from pdbus.client import connect
from tests.integration.stack.conftest import wait_until
from tests.support.encoders import minilm, reference
from tests.support.stack import Stack, running_stack

MODEL = "minilm"
SERVICE = "acme.items"
TEXTS = ["A cat is sleeping on the sofa.", "The kitten naps on the couch.", "The invoice is due next week."]


@pytest.fixture(scope="module")
def embedding_stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    env = {"PDBUS_FEATURE_SUBJECT": SERVICE}
    with running_stack(tmp_path_factory.mktemp("embed"), "--model", str(minilm()), "--name", MODEL, env=env) as stack:
        yield stack


@pytest.fixture
def embedder(embedding_stack: Stack) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{embedding_stack.url}/v1", api_key="unused", max_retries=0, timeout=60) as client:
        yield client


def vectors(answer: Any) -> np.ndarray:
    return np.array([item.embedding for item in answer.data], np.float32)


def pdbus(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "pdbus.stack", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=100)


def test_everything_but_a_decode_worker_runs(embedding_stack: Stack) -> None:
    kinds = {name.rpartition("-")[0] for name in embedding_stack.pids()} - {""}
    assert kinds == {"router", "param-server", "prefill", "cache", "invalidator"}
    assert "/v1/embeddings" in embedding_stack.output.read_text()


def test_the_official_client_s_embeddings(embedder: openai.OpenAI) -> None:
    found = vectors(embedder.embeddings.create(model=MODEL, input=TEXTS))
    near, far = found[0] @ found[1], found[0] @ found[2]
    assert near > 0.5 > far + 0.2
    tokenizer = Tokenizer.from_file(str(minilm() / "tokenizer.json"))
    tokenizer.no_padding()
    expected = reference(minilm(), [tokenizer.encode(text).ids for text in TEXTS]).numpy()
    assert np.abs(found - expected).max() < 1e-5


def test_the_second_time_it_comes_from_the_cache(embedding_stack: Stack) -> None:
    def ask() -> tuple[str, Any]:
        body = json.dumps({"model": MODEL, "input": ["something to remember", "and this"]}).encode()
        request = urllib.request.Request(
            f"{embedding_stack.url}/v1/embeddings", body, {"content-type": "application/json"}
        )
        with urllib.request.urlopen(request, timeout=60) as answer:
            return answer.headers["X-Feature-Cache"], json.loads(answer.read())

    first = ask()
    assert first[0] == "hits=0, misses=2"

    async def until_cached() -> tuple[str, Any]:
        async with asyncio.timeout(100):
            while (found := await asyncio.to_thread(ask))[0] != "hits=2, misses=0":
                pass
        return found

    assert asyncio.run(until_cached())[1] == first[1]
    with urllib.request.urlopen(f"{embedding_stack.url}/metrics", timeout=60) as answer:
        assert re.search(r'pdbus_router_features\w*\{[^}]*outcome="hit"[^}]*\} [1-9]', answer.read().decode())


def test_over_nats_from_python(embedding_stack: Stack, embedder: openai.OpenAI) -> None:
    async def ask() -> tuple[np.ndarray, bytes]:
        async with connect(embedding_stack.nats_url, MODEL) as client:
            found = await client.embed(TEXTS)
            return found.vectors, found.root

    found, root = asyncio.run(ask())
    answer = embedder.embeddings.create(model=f"{MODEL}@{root.hex()[:12]}", input=TEXTS)
    assert np.array_equal(found, vectors(answer))


def test_chat_is_refused_with_the_reason(embedding_stack: Stack, embedder: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError, match="embeds texts: use /v1/embeddings"):
        embedder.chat.completions.create(model=MODEL, messages=[{"role": "user", "content": "hello"}])
    done = pdbus("chat", "hello", "--data", str(embedding_stack.data))
    assert done.returncode == 1
    assert "embeds texts" in done.stdout + done.stderr


def test_status_and_health_tell_of_it(embedding_stack: Stack, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both listen for a second or three only: who is silent for so long on a busy machine is asked for again."""

    def status() -> Any:
        found = json.loads(pdbus("status", "--json", "--data", str(embedding_stack.data)).stdout)
        workers = [card for card in found["services"] if card["service"] == "prefill"]
        return (found, *workers) if workers else None

    found, worker = wait_until(status, "status tells of the worker")
    assert worker["embeds"] is True
    assert worker["state"] == "ready"
    assert found["refs"]["stable"] in worker["roots"]
    monkeypatch.setenv("NATS_URL", embedding_stack.nats_url)
    monkeypatch.setenv("PDBUS_MODEL", MODEL)
    wait_until(lambda: pdbus("health", "--service", "prefill").returncode == 0, "it is healthy")

    def ready() -> bool:
        with suppress(urllib.error.HTTPError), urllib.request.urlopen(f"{embedding_stack.url}/readyz", timeout=60):
            return True
        return False

    wait_until(ready, "the router is ready")


def test_a_service_of_one_s_own_is_asked_for_what_the_cache_lacks(embedding_stack: Stack) -> None:
    """Any NATS responder will do. A changed item is asked for again; so is everything, once its version is another."""
    items, asked = {"a": b"1", "b": b"2"}, []
    version = "v1"

    async def scenario() -> None:
        nonlocal version
        service = await nats.connect(embedding_stack.nats_url)

        async def answer(message: Any) -> None:
            keys = msgpack.unpackb(message.data)["keys"]
            asked.extend(keys)
            await message.respond(msgpack.packb({"version": version, "values": [items.get(key) for key in keys]}))

        await service.subscribe(SERVICE, cb=answer)
        await service.flush()
        async with connect(embedding_stack.nats_url, MODEL) as client:

            async def until(values: tuple[bytes | None, ...], hits: int) -> None:
                async with asyncio.timeout(100):
                    while True:
                        found = await client.features(["a", "b"])
                        if (found.values, found.hits) == (values, hits):
                            return

            assert (await client.features(["a", "b", "c"])).values == (b"1", b"2", None)
            await until((b"1", b"2"), 2)
            items["a"] = b"3"
            await client.features_changed(["a"])
            await until((b"3", b"2"), 2)
            items["b"], version = b"4", "v2"
            await until((b"3", b"4"), 2)
            assert set(asked) == {"a", "b", "c"}
        await service.close()

    asyncio.run(scenario())


def test_an_update_is_served_without_a_decode_worker(embedding_stack: Stack, embedder: openai.OpenAI) -> None:
    before = embedder.embeddings.create(model=MODEL, input=TEXTS)

    async def update() -> bytes:
        async with connect(embedding_stack.nats_url, MODEL) as client:
            async with client.weights.begin(message="a shifted norm") as change:
                name = "encoder.layer.5.output.LayerNorm.bias"
                await change.stage(name, np.linspace(-0.5, 0.5, 384, dtype=np.float32))
                committed = await change.commit()
            await client.weights.history()  # so that the commit is known here
            assert await client.weights.wait_for_ref("stable", committed.root, 100)
            async with asyncio.timeout(100):  # routers admit by it within 5 s
                while (await client.embed(TEXTS)).root != committed.root:
                    pass
            return committed.root

    root = asyncio.run(update())
    after = embedder.embeddings.create(model=MODEL, input=TEXTS)
    assert after.system_fingerprint == f"root-{root.hex()}"  # type: ignore[attr-defined]
    assert np.abs(vectors(after) - vectors(before)).max() > 0.01
    old = before.system_fingerprint.removeprefix("root-")  # type: ignore[attr-defined]
    again = embedder.embeddings.create(model=f"{MODEL}@{old[:12]}", input=TEXTS)
    assert np.array_equal(vectors(again), vectors(before))
