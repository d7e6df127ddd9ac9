"""The lean generator and the receiver of counters, each against a small peer of the test's own."""

from __future__ import annotations

import asyncio
import gzip
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import aiohttp
from aiohttp import web
from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2 import ExportMetricsServiceRequest

from loadtest.metrics import Counters, counters
from loadtest.router.flood import flood


@asynccontextmanager
async def server(status: int = 200, cut: bool = False) -> AsyncIterator[str]:
    async def answer(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse(status=status)
        await response.prepare(request)
        for number in range(3):
            await response.write(b'data: {"choices": [{"text": "%d"}]}\n\n' % number)
        if cut:
            assert request.transport is not None
            request.transport.abort()
        await response.write_eof()
        return response

    app = web.Application()
    app.add_routes([web.post("/v1/completions", answer)])
    runner = web.AppRunner(app)
    await runner.setup()
    try:
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        yield f"http://127.0.0.1:{runner.addresses[0][1]}"
    finally:
        await runner.cleanup()


async def test_streams_ask_again_and_again_and_end_by_themselves() -> None:
    until_s, seen = 0.2, None
    async with server() as url:
        while seen is None or len(seen.latencies_s) <= 4:  # a busy machine may take long for each
            seen = await flood([url], [{"prompt": "a"}, {"prompt": "b"}], until_s, keep_events=True)
            until_s *= 2
    assert not seen.errors
    assert len(seen.latencies_s) == len(seen.firsts_s) == len(seen.events)
    assert all(len(pieces) == 3 for pieces in seen.events)
    assert all(first <= whole for first, whole in zip(seen.firsts_s, seen.latencies_s, strict=True))


async def test_refusals_and_broken_answers_are_counted_and_never_hang() -> None:
    async with server(status=503) as url:
        refused = await flood([url], [{"prompt": "a"}], 0.2)
    async with server(cut=True) as url:
        broken = await flood([url], [{"prompt": "a"}], 0.2)
    assert sum(refused.errors.values()) >= 1
    assert any("503" in reason for reason in refused.errors)
    assert broken.errors == {"a connection was lost in mid-answer": 1}
    assert not refused.latencies_s
    assert not broken.latencies_s


async def test_every_answer_has_all_its_pieces_however_it_is_cut() -> None:
    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        event = b'data: {"choices": [{"text": "a"}]}\n\n'
        body = event * 3 + b"0\r\n\r\n"
        while await reader.read(1 << 16):
            writer.write(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n")
            for at in range(len(body)):  # byte by byte
                writer.write(body[at : at + 1])
                await asyncio.sleep(0)
        writer.close()

    async with await asyncio.start_server(answer, "127.0.0.1", 0) as server:
        url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        whole = await flood([url], [{"prompt": "a"}], 0.05, pieces=3)
        short = await flood([url], [{"prompt": "a"}], 0.05, pieces=4)
    assert whole.latencies_s
    assert not whole.errors
    assert short.errors == {"an answer in 3 pieces": len(short.latencies_s)}


def export(process: str, value: int) -> bytes:
    message = ExportMetricsServiceRequest()
    resource = message.resource_metrics.add()
    resource.resource.attributes.add(key="service.instance.id").value.string_value = process
    metric = resource.scope_metrics.add().metrics.add(name="reads")
    for outcome in ("hit", "miss"):
        point = metric.sum.data_points.add(as_int=value)
        point.attributes.add(key="outcome").value.string_value = outcome
    return message.SerializeToString()


def test_counters_keep_the_newest_total_of_each_process() -> None:
    known = Counters()
    for process, value in (("a", 1), ("a", 5), ("b", 2)):
        known.take(export(process, value))
    assert known.total("reads", outcome="hit") == 7
    assert known.total("reads") == 14
    assert known.total("writes") == 0
    assert known.by("reads") == {"outcome=hit": 7, "outcome=miss": 7}


async def test_exports_are_received_plain_and_compressed() -> None:
    async with counters() as known, aiohttp.ClientSession() as http:
        for process, body in (("a", export("a", 3)), ("b", gzip.compress(export("b", 4)))):
            async with http.post(f"{known.endpoint}/v1/metrics", data=body) as response:
                assert response.status == 200, process
        async with http.post(f"{known.endpoint}/v1/traces", data=b"spans") as response:
            assert response.status == 200
        assert known.total("reads", outcome="hit") == 7
    assert known.env["OTEL_EXPORTER_OTLP_ENDPOINT"] == known.endpoint
    await asyncio.sleep(0)
