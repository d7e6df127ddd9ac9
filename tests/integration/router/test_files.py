"""Files through the official client, on a real nats-server: what there is, how long it stays, and how much of it."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from pathlib import Path

import aiohttp
import openai
import pytest
from openai.types import Batch

from pdbus import keyfile
from pdbus.client import Client
from pdbus.errors import QuotaExceeded
from pdbus.messages.jobs import FileEntry
from pdbus.router.jobs.files import FileStore
from pdbus.router.jobs.shares import Shares
from pdbus.subjects import ANY, BATCHES, FILES
from tests.support.router_rig import Rig, rig, until

SHARE = 1 << 20


@dataclass
class World:
    """One tenant of a router with a small share of the disk."""

    r: Rig
    client: openai.AsyncOpenAI
    tenant: str
    key: str
    model: str

    async def put(self, content: bytes = b"x", name: str = "in.jsonl") -> str:
        return (await self.client.files.create(file=(name, content), purpose="batch")).id

    async def batch(self, *prompts: str) -> Batch:
        lines = [
            {"custom_id": prompt, "method": "POST", "url": "/v1/completions",
             "body": {"model": self.model, "prompt": prompt, "max_tokens": 2 if prompt != "bad" else -1}}
            for prompt in prompts
        ]  # fmt: skip
        file = await self.put(b"".join(json.dumps(line).encode() + b"\n" for line in lines))
        made = await self.client.batches.create(
            input_file_id=file, endpoint="/v1/completions", completion_window="24h",
            extra_body={"output_expires_after": {"anchor": "created_at", "seconds": 7200}},
        )  # fmt: skip
        async with asyncio.timeout(60):
            while made.completed_at is None:
                await asyncio.sleep(0.05)  # as callers do: nothing tells them
                made = await self.client.batches.retrieve(made.id)
        return made

    @property
    def used(self) -> int:
        assert self.r.router.jobs is not None
        return self.r.router.jobs.shares.used(self.tenant)


@pytest.fixture
async def w(nats_url: str, unique: Callable[[str], str], tmp_path: Path) -> AsyncIterator[World]:
    tenant, model = unique("t"), unique("files")
    key = keyfile.add(tmp_path / "keys.json", tenant).text
    async with (
        rig(nats_url=nats_url, model=model, keys_file=tmp_path / "keys.json", tenant_disk_bytes=SHARE) as r,
        openai.AsyncOpenAI(base_url=r.url + "/v1", api_key=key, max_retries=0, timeout=60) as client,
    ):
        yield World(r, client, tenant, key, model)
        await r.until_idle()


async def test_files_are_listed_page_by_page_also_while_they_are_deleted(w: World) -> None:
    made = [await w.put(name=f"{number}.jsonl") for number in range(5)]
    assert [file.id async for file in w.client.files.list(limit=2)] == made[::-1]
    assert [file.filename async for file in w.client.files.list(limit=3, order="asc")] == [
        f"{number}.jsonl" for number in range(5)
    ]
    page = await w.client.files.list(limit=2, after=made[2])
    assert ([file.id for file in page.data], page.has_more) == ([made[1], made[0]], False)
    async for file in w.client.files.list(limit=2):
        await w.client.files.delete(file.id)
    assert [file async for file in w.client.files.list()] == []
    for wrong in ({"limit": 0}, {"limit": 10_001}, {"order": "up"}):
        with pytest.raises(openai.BadRequestError, match=next(iter(wrong))):
            await w.client.files.list(extra_query=wrong)
    with pytest.raises(openai.NotFoundError):
        await w.client.files.list(after="file-no")


async def test_what_came_out_of_batches_is_listed_by_its_purpose(w: World) -> None:
    batch = await w.batch("a", "bad")
    assert batch.output_file_id
    assert batch.error_file_id
    out = {file.id async for file in w.client.files.list(purpose="batch_output")}
    assert out == {batch.output_file_id, batch.error_file_id}
    assert [file.id async for file in w.client.files.list(purpose="batch")] == [batch.input_file_id]
    assert {file.id async for file in w.client.files.list()} == {*out, batch.input_file_id}
    assert [file async for file in w.client.files.list(purpose="fine-tune")] == []
    kept = await w.client.files.retrieve(batch.output_file_id)
    assert (kept.expires_at or 0) - kept.created_at == 7200
    assert (await w.client.files.wait_for_processing(kept.id)).status == "processed"
    await w.client.files.delete(batch.error_file_id)
    assert [file.id async for file in w.client.files.list(purpose="batch_output")] == [batch.output_file_id]


async def test_a_deleted_output_takes_no_room_and_the_errors_stay(w: World) -> None:
    batch = await w.batch("a", "bad", "b")
    assert batch.output_file_id
    assert batch.error_file_id
    to = BATCHES(tenant=w.tenant, batch=batch.id)
    errors = (await w.client.files.content(batch.error_file_id)).content
    assert (await w.r.bus.logs.counts(to))[to.name] > 1
    await w.client.files.delete(batch.output_file_id)
    assert await w.r.bus.logs.counts(to) == {to.name: 1}
    assert (await w.client.files.content(batch.error_file_id)).content == errors
    assert b'"bad"' in errors
    state = await w.client.batches.retrieve(batch.id)
    assert (state.status, state.output_file_id, state.error_file_id) == ("completed", None, batch.error_file_id)
    assert state.request_counts
    assert state.request_counts.completed == 2


async def test_a_file_may_be_kept_for_less_and_no_longer_than_all_are(w: World) -> None:
    expires = {"anchor": "created_at", "seconds": 3600}
    file = await w.client.files.create(file=("a", b"x"), purpose="batch", expires_after=expires)  # type: ignore[arg-type]
    assert file.expires_at == file.created_at + 3600
    batch = await w.client.batches.create(
        input_file_id=file.id, endpoint="/v1/completions", completion_window="24h", extra_headers={"X-Priority": "9"}
    )
    assert (batch.expires_at or 0) <= file.expires_at + 1, "it can't be read for longer"
    for seconds in (3599, 60 * 86400):
        with pytest.raises(openai.BadRequestError, match="seconds"):
            await w.client.files.create(
                file=("a", b"x"), purpose="batch", expires_after={"anchor": "created_at", "seconds": seconds}
            )
    assert len([file async for file in w.client.files.list()]) == 1


async def test_a_tenant_has_a_share_and_no_more_and_gets_it_back(w: World, nats_url: str) -> None:
    first = await w.put(b"x" * (SHARE // 2))
    await until(lambda: w.used > SHARE // 2)
    with pytest.raises(openai.RateLimitError, match="delete files") as refused:
        await w.put(b"x" * (SHARE // 2))
    assert (refused.value.code, refused.value.type) == ("quota_exceeded", "insufficient_quota")
    assert refused.value.response.headers["x-should-retry"] == "false", "no waiting for what takes a day"
    await w.put(b"x" * (SHARE // 4))
    await until(lambda: w.used > SHARE * 3 // 4)
    ask = {"endpoint": "/v1/completions", "body": {"model": w.model, "prompt": "x" * (SHARE // 4), "max_tokens": 1}}
    bearer = {"Authorization": f"Bearer {w.key}"}
    async with aiohttp.ClientSession(w.r.url, headers=bearer) as http, http.post("/v1/jobs", json=ask) as response:
        assert (response.status, int(response.headers["Retry-After"]) > 24 * 3600) == (429, True)
    with pytest.raises(QuotaExceeded):
        await Client(w.r.bus, w.model, timeout_s=30, api_key=w.key).jobs.submit("completions", ask["body"])  # type: ignore[arg-type]
    await w.client.files.delete(first)
    await until(lambda: w.used < SHARE // 2)
    await w.put(b"x" * (SHARE // 2))


async def test_an_upload_that_breaks_off_gives_its_room_back(w: World) -> None:
    form = b'--b\r\nContent-Disposition: form-data; name="file"; filename="a"\r\n\r\n' + b"x" * 600_000
    _, writer = await asyncio.open_connection("127.0.0.1", int(w.r.url.rpartition(":")[2]))
    head = f"Host: a\r\nAuthorization: Bearer {w.key}\r\nContent-Type: multipart/form-data; boundary=b"
    writer.write(f"POST /v1/files HTTP/1.1\r\n{head}\r\nContent-Length: 900000\r\n\r\n".encode() + form)
    await until(lambda: w.used > 500_000)
    writer.close()
    await until(lambda: w.used < 2_000)
    assert [file async for file in w.client.files.list()] == []


@pytest.mark.parametrize(
    "part",
    [
        b"no colon\r\n\r\nx",
        b"Content-Type: a/b\r\nContent-Type: a/b\r\n\r\nx",
        b"X: " + b"y" * 9000 + b"\r\n\r\nx",
        b'Content-Disposition: form-data; name="_charset_"\r\n\r\n' + b"x" * 40,
        b'Content-Disposition: form-data; name="file"\r\nContent-Length: x\r\n\r\nx',
    ],
)
async def test_a_form_that_is_none_is_the_senders_fault(w: World, part: bytes) -> None:
    headers = {"Authorization": f"Bearer {w.key}", "Content-Type": "multipart/form-data; boundary=b"}
    async with (
        aiohttp.ClientSession(w.r.url, headers=headers) as http,
        http.post("/v1/files", data=b"--b\r\n" + part + b"\r\n--b--\r\n") as response,
    ):
        assert response.status == 400, await response.text()


async def test_what_a_dead_router_left_of_an_upload_is_removed_by_whoever_looks(w: World) -> None:
    to = FILES(tenant=w.tenant, file="file-left")
    for at in (0, 3):
        await w.r.bus.logs.append(to, FileEntry(b"abc", at=at))
    for later_s, left in ((0, 2), (3600, 1)):  # it may still be coming, and then not any more
        store = FileStore(w.r.bus.logs, Shares(SHARE), lambda later_s=later_s: time.time() + later_s)
        assert await store.of(w.tenant) == []
        assert await w.r.bus.logs.counts(FILES(tenant=w.tenant, file=ANY)) == {to.name: left}
