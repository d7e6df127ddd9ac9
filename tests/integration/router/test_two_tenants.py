"""Two tenants of one installation: each attempt to reach across, by every way that leads from one to the other.

What is a service's alone (cancels, tokens, cache nodes, logs, others' inboxes) NATS itself refuses to callers:
those attempts are in tests/integration/bus/test_permissions.py, on a real server. Embeddings have theirs beside."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
import openai
import pytest

from pdbus import keyfile
from pdbus.canonical import content_digest, digest
from pdbus.client import Client
from pdbus.context import Deadline, RequestContext
from pdbus.errors import NotFound, Overloaded, Unauthorized
from pdbus.messages.router import InferRequest
from pdbus.router.identity import Identities
from pdbus.router.jobs.execute import Asked, Seen
from pdbus.router.sessions import named_session
from pdbus.subjects import INFER
from tests.support.completing import completion
from tests.support.router_rig import MODEL, Rig, rig, until

PREFIX = "You are a helpful assistant, and you know these things by heart: "  # 4 pages and one token


@dataclass
class Tenants:
    """A router that asks for keys, and the keys of two tenants."""

    r: Rig
    http: aiohttp.ClientSession
    file: Path
    a: str
    b: str

    async def post(self, key: str | None, *, cache: str = "", **fields: Any) -> tuple[int, dict[str, Any], Any]:
        headers = {"Cache-Control": cache} | ({} if key is None else {"Authorization": f"Bearer {key}"})
        headers |= fields.pop("headers", {})
        async with self.http.post(f"{self.r.url}/v1/completions", json=completion(**fields), headers=headers) as got:
            return got.status, await got.json(), got.headers

    async def ask(self, key: str, **fields: Any) -> tuple[dict[str, Any], Any]:
        status, answer, headers = await self.post(key, **fields)
        assert status == 200, answer
        return answer, headers


@pytest.fixture
async def t(tmp_path: Path) -> AsyncIterator[Tenants]:
    file = tmp_path / "keys.json"
    a, b = (keyfile.add(file, name).text for name in ("a", "b"))
    async with rig(keys_file=file) as r, aiohttp.ClientSession() as http:
        yield Tenants(r, http, file, a, b)
        await r.until_idle()


def cached(answer: dict[str, Any]) -> int:
    return int(answer["usage"]["prompt_tokens_details"]["cached_tokens"])


async def test_nobody_comes_in_without_a_key_and_is_told_so_as_openai_tells_it(t: Tenants) -> None:
    for key in (None, "", "sk-none", t.a[:-1], t.a + "x"):
        status, answer, headers = await t.post(key)
        assert (status, answer["error"]["type"], answer["error"]["code"]) == (
            401, "authentication_error", "invalid_api_key",
        )  # fmt: skip
        assert headers["WWW-Authenticate"] == "Bearer"
        assert not key or key not in str(answer)
    client = openai.AsyncOpenAI(base_url=f"{t.r.url}/v1", api_key="sk-wrong", max_retries=0)
    async with client:
        with pytest.raises(openai.AuthenticationError):
            await client.models.list()
        with pytest.raises(openai.AuthenticationError):
            await client.completions.create(model=MODEL, prompt="x")
    assert not any(worker.tickets for worker in t.r.workers)


async def test_a_stranger_s_body_is_not_even_read(t: Tenants) -> None:
    async def endless() -> AsyncIterator[bytes]:
        while True:
            yield b"x" * 1000
            await asyncio.sleep(0.01)

    async with asyncio.timeout(30), t.http.post(f"{t.r.url}/v1/completions", data=endless()) as got:
        assert got.status == 401


async def test_what_collectors_and_balancers_ask_for_needs_no_key_and_names_no_tenant(t: Tenants) -> None:
    await t.ask(t.a, prompt="SECRET PROMPT")
    for page in ("healthz", "readyz", "health", "metrics", "openapi.json"):
        async with t.http.get(f"{t.r.url}/{page}") as got:
            text = await got.text()
            assert got.status == 200
            assert "SECRET" not in text
            assert t.a not in text
            assert 'tenant="' not in text


async def test_results_of_another_are_not_found(t: Tenants) -> None:
    first, headers = await t.ask(t.a, prompt=PREFIX)
    assert headers["X-Result-Cache"] == "miss"
    other, headers = await t.ask(t.b, prompt=PREFIX)
    assert headers["X-Result-Cache"] == "miss"
    again, headers = await t.ask(t.a, prompt=PREFIX)
    assert headers["X-Result-Cache"] == "hit"
    assert again["choices"] == first["choices"] == other["choices"], "the same weights say the same to both"


async def test_a_prefix_of_another_saves_no_time(t: Tenants) -> None:
    """A hit would tell by its quickness, and by `cached_tokens`, that somebody has sent that text before."""
    await t.ask(t.a, prompt=PREFIX, cache="no-store")
    await _index_is_right(t.r)
    other, _ = await t.ask(t.b, prompt=PREFIX, cache="no-store")
    assert cached(other) == 0
    await _index_is_right(t.r)
    own, _ = await t.ask(t.a, prompt=PREFIX, cache="no-store")
    assert cached(own) == 64


async def _index_is_right(r: Rig) -> None:
    table = r.router.index.table
    await r.until_idle()
    await until(lambda: all(table.keys_of(w.id) == w.pages.count for w in r.workers))


async def test_salts_can_not_be_made_from_what_a_tenant_knows(t: Tenants) -> None:
    """Its name, the name of the other, and how an installation without keys makes them."""
    await t.ask(t.a, prompt=PREFIX)
    ticket = t.r.prefills[0].tickets[0]
    guesses = {digest(["pdbus tenant salt", name]) for name in ("a", "b", "anonymous")}
    guesses |= {Identities().salt(name) for name in ("a", "b")}
    assert (ticket.tenant, ticket.salt) == ("a", Identities(t.file).salt("a"))
    assert ticket.salt not in guesses
    for key, (_, material, _) in t.r.ring.entries.items():
        assert ticket.salt not in material
        assert key not in (digest([material]), content_digest(material))


async def test_an_idempotency_key_of_another_is_as_free_as_any(t: Tenants) -> None:
    named = {"headers": {"Idempotency-Key": "order-1"}}
    await t.ask(t.a, prompt="of a", temperature=1, **named)
    status, _, _ = await t.post(t.a, prompt="another", temperature=1, **named)
    assert status == 409
    await t.ask(t.b, prompt="another", temperature=1, **named)
    await t.ask(t.b, prompt="another", temperature=1, **named)
    seeds = {ticket.tenant: ticket.seed for ticket in t.r.prefills[0].tickets}
    assert seeds["a"] != seeds["b"]


async def test_a_request_of_another_at_work_is_neither_waited_for_nor_ended(t: Tenants) -> None:
    """Single flight is per tenant: else whoever asks the same would be slowed, or told of it, or could end both."""
    for worker in t.r.workers:
        worker.behaviour.mute = True
    named = {"prompt": PREFIX, "headers": {"Idempotency-Key": "same"}}
    own = asyncio.create_task(t.post(t.a, **named))
    await until(lambda: len(t.r.prefills[0].tickets) == 1)
    other = asyncio.create_task(t.post(t.b, **named))
    await until(lambda: len(t.r.prefills[0].tickets) == 2)
    other.cancel()
    with pytest.raises(asyncio.CancelledError):
        await other
    await until(lambda: t.r.router.frontend.admission.running == 1)
    assert not own.done()
    own.cancel()
    with pytest.raises(asyncio.CancelledError):
        await own


async def test_a_tenant_that_is_only_claimed_is_not_believed(t: Tenants) -> None:
    await t.ask(t.a, prompt=PREFIX)
    for headers in ({"pd-tenant": "a"}, {"X-Tenant": "a"}, {"pd-key": t.a}):
        await t.ask(t.b, prompt=f"{PREFIX}{headers}", headers=headers)
        assert t.r.prefills[0].tickets[-1].tenant == "b"
        status, _, _ = await t.post(None, prompt=PREFIX, headers=headers)
        assert status == 401
    body = completion(prompt=PREFIX)
    for claimed in (RequestContext(Deadline.after(30), tenant="a"), RequestContext(Deadline.after(30), api_key="a")):
        with pytest.raises(Unauthorized):
            async with t.r.bus.stream(INFER(model=MODEL), InferRequest("completions", body), claimed) as replies:
                await anext(aiter(replies))
    before = len(t.r.prefills[0].tickets)
    ctx = RequestContext(Deadline.after(30), tenant="a", api_key=t.b)
    async with t.r.bus.stream(INFER(model=MODEL), InferRequest("completions", body | {"prompt": "x"}), ctx) as replies:
        await anext(aiter(replies))
    assert t.r.prefills[0].tickets[before].tenant == "b"


async def test_the_python_client_shows_its_key(t: Tenants) -> None:
    client = Client(t.r.bus, MODEL, timeout_s=30, api_key=t.b)
    assert (await client.complete("hello", max_tokens=3))["choices"]
    assert t.r.prefills[0].tickets[-1].tenant == "b"
    with pytest.raises(Unauthorized):
        await Client(t.r.bus, MODEL, timeout_s=30).complete("hello", max_tokens=3)


async def test_one_tenant_s_quota_is_used_up_by_it_alone(t: Tenants, tmp_path: Path) -> None:
    greedy = keyfile.add(t.file, "a", requests_per_minute=2).text
    async with rig(keys_file=t.file) as r:
        own = Tenants(r, t.http, t.file, greedy, t.b)
        begun_s = time.monotonic()
        for number in range(2):
            await own.ask(greedy, prompt=str(number))
        status, answer, headers = await own.post(greedy, prompt="3")
        assert (status, answer["error"]["code"]) == (429, "overloaded")
        assert 29 - (time.monotonic() - begun_s) <= int(headers["Retry-After"]) <= 31
        assert headers["x-should-retry"] == "true"
        await own.ask(t.b, prompt="3")
        await own.ask(t.a, prompt="3")  # another key of the same tenant has its own
        ctx = RequestContext(Deadline.after(30), api_key=greedy)
        with pytest.raises(Overloaded):
            async with r.bus.stream(INFER(model=MODEL), InferRequest("completions", completion()), ctx) as replies:
                await anext(aiter(replies))


async def test_tokens_count_whether_read_or_written(t: Tenants) -> None:
    key = keyfile.add(t.file, "a", tokens_per_minute=60).text
    async with rig(keys_file=t.file) as r:
        own = Tenants(r, t.http, t.file, key, t.b)
        begun_s = time.monotonic()
        answer, _ = await own.ask(key, prompt=PREFIX)
        used = answer["usage"]["total_tokens"]
        status, _, headers = await own.post(key, prompt="x")
        assert status == 429
        assert used - 61 - (time.monotonic() - begun_s) <= int(headers["Retry-After"]) <= used - 60 + 3


def test_the_same_session_of_two_tenants_is_two() -> None:
    """Which version a session is served by while a canary runs tells nothing of another's."""
    assert len({named_session(name, "s", None) for name in ("a", "b")}) == 2


async def test_jobs_batches_and_files_of_another_are_not_there(
    t: Tenants, nats_url: str, unique: Callable[[str], str]
) -> None:
    """Not to be seen, waited for, watched, read, listed, used, cancelled or deleted; nor taken over by the same key."""
    model = unique("tenants")
    async with rig(nats_url=nats_url, model=model, keys_file=t.file) as r:
        mine, other = (openai.AsyncOpenAI(base_url=f"{r.url}/v1", api_key=key, max_retries=0) for key in (t.a, t.b))
        ask = {"prompt": "SECRET", "max_tokens": 4, "temperature": 1}
        own, strange = (Client(r.bus, model, timeout_s=30, api_key=key) for key in (t.a, t.b))
        job = await own.jobs.submit("completions", ask, idempotency_key="same")
        for reach in (strange.jobs.state, strange.jobs.cancel, strange.jobs.result):
            with pytest.raises(NotFound):
                await reach(job.id)  # type: ignore[operator]
        with pytest.raises(NotFound):
            async for _ in strange.jobs.progress(job.id):
                pass
        with pytest.raises(Unauthorized):
            await Client(r.bus, model, timeout_s=30).jobs.state(job.id)
        theirs = await strange.jobs.submit("completions", ask | {"prompt": "x"}, idempotency_key="same")
        assert theirs.id != job.id
        assert (await own.jobs.result(job.id, wait_s=30))["choices"][0]["text"]
        await strange.jobs.result(theirs.id, wait_s=30)
        async with mine, other:
            body = {"model": model, **ask}
            line = {"custom_id": "1", "method": "POST", "url": "/v1/completions", "body": body}
            file = await mine.files.create(file=("in.jsonl", json.dumps(line).encode()), purpose="batch")
            new: dict[str, Any] = {"endpoint": "/v1/completions", "completion_window": "24h"}
            batch = await mine.batches.create(input_file_id=file.id, **new)
            async with asyncio.timeout(30):
                while batch.output_file_id is None:
                    await asyncio.sleep(0.05)  # as callers do: nothing tells them
                    batch = await mine.batches.retrieve(batch.id)
            for id_ in (file.id, batch.output_file_id):
                for touch in (other.files.retrieve, other.files.content, other.files.delete):
                    with pytest.raises(openai.NotFoundError):
                        await touch(id_)
            assert [known async for known in other.files.list()] == []
            for id_ in (file.id, batch.output_file_id):
                with pytest.raises(openai.NotFoundError):
                    await other.files.list(after=id_)
            for look in (other.batches.retrieve, other.batches.cancel):
                with pytest.raises(openai.NotFoundError):
                    await look(batch.id)
            with pytest.raises(openai.NotFoundError):
                await other.batches.create(input_file_id=file.id, **new)
            with pytest.raises(openai.NotFoundError):
                await other.batches.list(after=batch.id)
            assert batch.id not in [known.id async for known in other.batches.list()]
            assert (await mine.files.content(batch.output_file_id)).text
        assert {ticket.tenant for ticket in r.prefills[0].tickets} == {"a", "b"}


async def test_a_revoked_key_s_jobs_are_not_computed(t: Tenants, nats_url: str, unique: Callable[[str], str]) -> None:
    async with rig(nats_url=nats_url, model=unique("tenants"), keys_file=t.file) as r:
        asked = Asked("a", keyfile.id_of(t.a + "x") or "", "completions", b"{}", "job-1", time.time() + 60)
        assert r.router.jobs is not None
        outcome = await r.router.jobs.executor.run(asked, Seen())
        assert outcome.status_code == 401
