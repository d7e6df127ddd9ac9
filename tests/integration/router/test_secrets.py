"""Keys and prompts stay where they belong: nothing of them is in a log, a span, a metric or an error, at any level."""

from __future__ import annotations

import asyncio
import logging
from pathlib import Path
from urllib.parse import urlsplit

import aiohttp
import pytest
from opentelemetry import trace
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from pdbus import keyfile
from pdbus.client import Client
from pdbus.context import Deadline, RequestContext
from pdbus.errors import PdbusError
from pdbus.messages.router import InferRequest
from pdbus.router.frontend import Frontend
from pdbus.subjects import INFER
from pdbus.telemetry import prometheus_text
from tests.support.completing import completion
from tests.support.router_rig import MODEL, rig

PROMPT = "Nobody-else's-business-9431"
"""Of 27 tokens: one for each byte."""


@pytest.fixture
def spans(monkeypatch: pytest.MonkeyPatch) -> InMemorySpanExporter:
    exporter = InMemorySpanExporter()
    provider = TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    monkeypatch.setattr(trace, "get_tracer", lambda *args, **kwargs: provider.get_tracer("test"))
    return exporter


async def test_nothing_secret_is_told(
    tmp_path: Path,
    spans: InMemorySpanExporter,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    caplog.set_level(logging.DEBUG)
    file = tmp_path / "keys.json"
    key = keyfile.add(file, "acme").text
    wrong = keyfile.add(tmp_path / "other.json", "acme").text
    told: list[str] = []
    async with rig(keys_file=file) as r, aiohttp.ClientSession() as http:

        async def post(path: str, body: object, token: str = key) -> int:
            headers = {"Authorization": f"Bearer {token}", "Idempotency-Key": PROMPT, "X-Session-Id": PROMPT}
            data = {"data": body} if isinstance(body, bytes) else {"json": body}
            async with http.post(r.url + path, headers=headers, **data) as response:  # type: ignore[arg-type]
                text = await response.text()
                if response.status != 200:
                    told.append(text)
                told.extend(response.headers.values())
                return response.status

        assert await post("/v1/completions", completion(prompt=PROMPT)) == 200
        assert await post("/v1/completions", completion(prompt=PROMPT, stream=True)) == 200
        assert await post("/v1/chat/completions", {"model": MODEL, "messages": [{"role": "user", "content": PROMPT}]})
        assert await post("/v1/completions", completion(prompt=PROMPT), wrong) == 401
        assert await post("/v1/completions", completion(prompt=PROMPT, n=99)) == 400
        assert await post("/v1/completions", completion(prompt=PROMPT, max_tokens=10**9)) in (200, 400, 409)
        assert await post("/v1/completions", completion(prompt=[PROMPT, 5])) == 400
        assert await post("/v1/completions", b'{"prompt": "' + PROMPT.encode() + b'"') == 400
        assert await post("/v1/embeddings", {"model": MODEL, "input": PROMPT}) >= 400
        client = Client(r.bus, MODEL, timeout_s=30, api_key=key)
        await client.complete(PROMPT, max_tokens=3)
        ctx = RequestContext(Deadline.after(30), api_key=key)
        for body in (completion(prompt=[PROMPT, 5]), completion(prompt=PROMPT, n=99)):
            with pytest.raises(PdbusError) as refused:
                async with r.bus.stream(INFER(model=MODEL), InferRequest("completions", body), ctx) as replies:
                    await anext(aiter(replies))
            told.append(refused.value.message)
        told += [repr(ctx), str(ctx)]

        async def broken(*_: object) -> None:
            raise ValueError(f"a fault that quotes {PROMPT} and {key}")

        monkeypatch.setattr(Frontend, "_prepare", broken)
        assert await post("/v1/completions", completion(prompt="x")) in (409, 500)
        told.append(prometheus_text().decode())
        logged = [record.getMessage() for record in caplog.records]
    told += logged
    for span in spans.get_finished_spans():
        told.append(span.to_json())
    assert len(told) > 30
    assert spans.get_finished_spans()
    for secret in (key, key[17:], wrong[17:], PROMPT):
        assert not [text for text in told if secret in text]


async def test_a_broken_head_is_neither_logged_nor_told_to_others(caplog: pytest.LogCaptureFixture) -> None:
    """aiohttp would log each with the header that is wrong, and so could be a key; and anybody could fill the disk."""
    async with rig() as r:
        at = urlsplit(r.url)
        for head in (
            b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer pd-secret\x01\r\n\r\n",
            b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nAutho\x00: Bearer pd-secret\r\n\r\n",
            b"nonsense pd-secret\r\n\r\n",
        ):
            reader, writer = await asyncio.open_connection(at.hostname, at.port)
            writer.write(head)
            assert b" 400 " in await reader.readline()
            writer.close()
    assert "secret" not in caplog.text
    assert not [record for record in caplog.records if record.levelno >= logging.WARNING]
