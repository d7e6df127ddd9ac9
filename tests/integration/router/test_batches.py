"""Batches through the official client, on a real nats-server: every line one result, whatever happens to routers."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from typing import Any

import aiohttp
import openai
import pytest
from openai.types import Batch

from pdbus.bus.bus import connect
from pdbus.bus.presence import Fleet
from pdbus.router.jobs.service import JobService
from pdbus.router.settings import RouterSettings
from pdbus.router.wiring import router
from pdbus.subjects import FILES
from tests.support.feature_entries import DictEntries
from tests.support.router_rig import Rig, rig, until

Unique = Callable[[str], str]


@pytest.fixture
async def r(nats_url: str, unique: Unique) -> AsyncIterator[Rig]:
    async with rig(nats_url=nats_url, model=unique("batches")) as made:
        yield made
        await made.until_idle()


@pytest.fixture
async def client(r: Rig) -> AsyncIterator[openai.AsyncOpenAI]:
    async with openai.AsyncOpenAI(base_url=r.url + "/v1", api_key="any", max_retries=0, timeout=60) as made:
        yield made


def line(r: Rig, number: int, **fields: Any) -> dict[str, Any]:
    body = {"model": r.router.frontend.models.model, "prompt": f"line {number}", "max_tokens": 5, **fields}
    return {"custom_id": f"c-{number}", "method": "POST", "url": "/v1/completions", "body": body}


def jsonl(lines: Sequence[Any]) -> bytes:
    return b"".join(json.dumps(line).encode() + b"\n" for line in lines)


async def submit(client: openai.AsyncOpenAI, content: bytes, **more: Any) -> Batch:
    file = await client.files.create(file=("in.jsonl", content), purpose="batch")
    return await client.batches.create(
        input_file_id=file.id, endpoint="/v1/completions", completion_window="24h", **more
    )


async def ended(client: openai.AsyncOpenAI, id_: str, within_s: float = 60) -> Batch:
    async with asyncio.timeout(within_s):
        while True:
            batch = await client.batches.retrieve(id_)
            if batch.status not in ("validating", "in_progress", "cancelling"):
                return batch
            await asyncio.sleep(0.05)  # as callers do: nothing tells them


async def read(client: openai.AsyncOpenAI, file: str | None) -> list[dict[str, Any]]:
    if file is None:
        return []
    return [json.loads(line) for line in (await client.files.content(file)).text.splitlines()]


async def test_a_batch_from_file_to_answers(r: Rig, client: openai.AsyncOpenAI) -> None:
    content = jsonl([*(line(r, number) for number in range(20)), line(r, 99, temperature=-1)])
    batch = await submit(client, content, metadata={"night": "1"})
    assert (batch.object, batch.status, batch.metadata) == ("batch", "validating", {"night": "1"})
    batch = await ended(client, batch.id)
    assert batch.status == "completed"
    assert batch.request_counts is not None
    counts = batch.request_counts
    assert (counts.total, counts.completed, counts.failed) == (21, 20, 1)
    answers = await read(client, batch.output_file_id)
    told = [answer["response"]["body"]["usage"] for answer in answers]
    assert batch.usage is not None
    assert batch.usage.output_tokens == 20 * 5
    assert batch.usage.input_tokens == sum(usage["prompt_tokens"] for usage in told)
    assert batch.usage.total_tokens == sum(usage["total_tokens"] for usage in told)
    cached = sum(usage["prompt_tokens_details"]["cached_tokens"] for usage in told)
    assert batch.usage.input_tokens_details.cached_tokens == cached
    assert {answer["custom_id"] for answer in answers} == {f"c-{number}" for number in range(20)}
    assert len(answers) == 20
    for answer in answers:
        assert answer["error"] is None
        assert answer["response"]["status_code"] == 200
        assert answer["response"]["body"]["usage"]["completion_tokens"] == 5
    (failed,) = await read(client, batch.error_file_id)
    assert (failed["custom_id"], failed["response"]["status_code"]) == ("c-99", 400)
    assert failed["response"]["body"]["error"]["param"] == "temperature"
    assert batch.output_file_id is not None
    made = await client.files.retrieve(batch.output_file_id)
    assert made.bytes == len((await client.files.content(batch.output_file_id)).content)
    assert made.purpose == "batch_output"
    await client.files.delete(batch.output_file_id)
    with pytest.raises(openai.NotFoundError):
        await client.files.content(batch.output_file_id)
    assert (await client.batches.retrieve(batch.id)).output_file_id is None


async def test_files_are_kept_whole_and_deleted_at_once(r: Rig, client: openai.AsyncOpenAI) -> None:
    content = b"\n" * 1_300_000 + b'{"end": 1}'
    file = await client.files.create(file=("big.jsonl", content), purpose="batch")
    assert (file.bytes, file.filename, file.purpose) == (len(content), "big.jsonl", "batch")
    assert (await client.files.content(file.id)).content == content
    to = FILES(tenant="anonymous", file=file.id)
    assert (await r.bus.logs.counts(to)) == {to.name: 4}
    assert (await client.files.delete(file.id)).deleted
    assert (await r.bus.logs.counts(to)) == {to.name: 1}, "a mark, and nothing of the content"
    for ask in (client.files.retrieve, client.files.content, client.files.delete):
        with pytest.raises(openai.NotFoundError):
            await ask(file.id)
    with pytest.raises(openai.BadRequestError, match="purpose"):
        await client.files.create(file=("x", b"x"), purpose="assistants")
    with pytest.raises(openai.BadRequestError, match="empty"):
        await client.files.create(file=("x", b""), purpose="batch")


async def test_a_file_that_is_no_batch_is_told_line_by_line(r: Rig, client: openai.AsyncOpenAI) -> None:
    other = line(r, 1) | {"url": "/v1/chat/completions"}
    batch = await ended(client, (await submit(client, jsonl([line(r, 1), other, line(r, 1)]) + b"{no json\n")).id)
    assert batch.status == "failed"
    assert batch.errors is not None
    assert [(error.code, error.line) for error in batch.errors.data or ()] == [
        ("mismatched_url", 2), ("duplicate_custom_id", 3), ("invalid_json_line", 4),
    ]  # fmt: skip
    with pytest.raises(openai.NotFoundError):
        await client.batches.create(input_file_id="file-no", endpoint="/v1/completions", completion_window="24h")
    with pytest.raises(openai.ConflictError):
        await client.batches.cancel(batch.id)


async def test_a_cancelled_batch_keeps_what_is_answered_and_begins_nothing(r: Rig, client: openai.AsyncOpenAI) -> None:
    for worker in r.workers:
        worker.behaviour.mute = True
    batch = await submit(client, jsonl([line(r, number) for number in range(100)]))
    await until(lambda: len(r.prefills[0].tickets) >= 30)
    assert (await client.batches.cancel(batch.id)).status in ("cancelling", "cancelled")
    batch = await ended(client, batch.id)
    assert batch.status == "cancelled"
    await r.until_idle()
    assert len(r.prefills[0].tickets) <= 32
    assert (await client.batches.cancel(batch.id)).status == "cancelled"


async def test_batches_are_listed_page_by_page(r: Rig, client: openai.AsyncOpenAI) -> None:
    """Others of the session are there too: all tests are one tenant."""
    own = [(await submit(client, jsonl([line(r, 1)]))).id for _ in range(3)]
    seen = [batch.id async for batch in client.batches.list(limit=2)]
    assert [id_ for id_ in seen if id_ in own] == own[::-1]
    assert len(set(seen)) == len(seen)
    for id_ in own:
        await ended(client, id_)


async def test_the_same_batch_under_one_key_is_one(r: Rig, client: openai.AsyncOpenAI) -> None:
    file = await client.files.create(file=("in.jsonl", jsonl([line(r, 1)])), purpose="batch")
    ask: dict[str, Any] = {"input_file_id": file.id, "endpoint": "/v1/completions", "completion_window": "24h"}
    key = {"Idempotency-Key": r.router.frontend.models.model}
    made = [await client.batches.create(**ask, extra_headers=key) for _ in range(3)]
    assert len({batch.id for batch in made}) == 1
    with pytest.raises(openai.ConflictError):
        await client.batches.create(**ask, metadata={"a": "b"}, extra_headers=key)
    await ended(client, made[0].id)
    assert len(r.prefills[0].tickets) == 1


async def test_a_router_that_is_stopped_in_mid_batch_leaves_every_line_one_result(
    r: Rig, client: openai.AsyncOpenAI, nats_url: str
) -> None:
    for worker in r.workers:
        worker.behaviour.step_s = 0.01
    assert r.router.jobs is not None
    await r.router.jobs.stop_intake()
    async with another(r, nats_url, "r-1") as first:
        batch = await submit(client, jsonl([line(r, number, max_tokens=10) for number in range(80)]))
        await until(lambda: len(r.prefills[0].tickets) > 40)
        await first.stop_intake()
    async with another(r, nats_url, "r-2"):
        batch = await ended(client, batch.id)
    assert batch.status == "completed"
    answers = await read(client, batch.output_file_id)
    assert sorted(answer["custom_id"] for answer in answers) == sorted(f"c-{number}" for number in range(80))
    assert all(len(answer["response"]["body"]["choices"][0]["text"]) == 10 for answer in answers)


@asynccontextmanager
async def another(r: Rig, nats_url: str, id_: str) -> AsyncIterator[JobService]:
    """A router beside the rig's."""
    settings = RouterSettings(id=id_, model=r.router.frontend.models.model, http_port=0)
    async with (
        connect(nats_url, name=id_) as bus,
        Fleet(bus) as fleet,
        router(settings, bus, fleet, r.versions, r.versions, r.ring, DictEntries()) as made,
    ):
        await until(lambda: not made.why_not_ready())
        assert made.jobs is not None
        yield made.jobs


async def test_what_the_openapi_document_says_of_jobs_is_served(r: Rig) -> None:
    async with aiohttp.ClientSession() as http:
        async with http.get(r.url + "/openapi.json") as response:
            document = await response.json()
        told = {path for path in document["paths"] if path.startswith(("/v1/jobs", "/v1/batches", "/v1/files"))}
        assert len(told) == 8
        for path in told:
            for method in document["paths"][path].keys() - {"parameters"}:
                async with http.request(method, r.url + path.replace("{id}", "x"), data=b"{") as response:
                    answer = await response.json()
                assert str(response.status) in document["paths"][path][method]["responses"], (method, path)
                assert response.status == 200 or "there is no /v1" not in answer["error"]["message"]


async def test_a_single_job_by_http(r: Rig) -> None:
    asked = {"endpoint": "/v1/completions", "body": line(r, 7)["body"], "metadata": {"a": "b"}}
    async with aiohttp.ClientSession(r.url) as http:
        async with http.post("/v1/jobs", json=asked, headers={"Idempotency-Key": "7", "X-Priority": "3"}) as response:
            job = await response.json()
        async with http.post("/v1/jobs", json=asked | {"body": {}}, headers={"Idempotency-Key": "7"}) as response:
            assert response.status == 400
        async with http.get(f"/v1/jobs/{job['id']}", params={"wait": 60}) as response:
            done = await response.json()
        async with http.delete(f"/v1/jobs/{job['id']}") as response:
            assert await response.json() == done, "a result stays"
        async with http.get("/v1/jobs/other") as response:
            assert (response.status, (await response.json())["error"]["code"]) == (404, "not_found")
    assert (done["status"], done["metadata"], done["response"]["status_code"]) == ("completed", {"a": "b"}, 200)
    assert done["response"]["body"]["choices"][0]["finish_reason"] == "length"
    assert [ticket.priority for ticket in r.prefills[0].tickets] == [3]
