"""The HTTP front: pages, deadlines, how bytes leave, and the way out."""

from __future__ import annotations

import asyncio
import json
import socket
import threading
import time
from typing import Any

import aiohttp
import pytest
from prometheus_client.parser import text_string_to_metric_families

from pdbus.context import Deadline
from pdbus.router.tokenizer import Tokenizer
from tests.support.http_front import BODY, post
from tests.support.router_rig import MODEL, Rig, rig, until

VERSIONS = 2
"""Of the rig `r`."""


async def test_pages(http: aiohttp.ClientSession, r: Rig):
    for path in ("/healthz", "/readyz", "/health"):
        async with http.get(r.url + path) as response:
            assert response.status == 200
            assert (await response.json())["status"] == "ok"
    async with http.get(r.url + "/metrics") as response:
        assert response.headers["Content-Type"].startswith("text/plain")
        list(text_string_to_metric_families(await response.text()))


async def test_not_ready_without_workers(http: aiohttp.ClientSession):
    async with rig(decodes=0) as r:
        async with http.get(r.url + "/readyz") as response:
            assert response.status == 503
            assert "worker" in (await response.json())["detail"]
        async with http.get(r.url + "/healthz") as response:
            assert response.status == 200


async def test_the_openapi_document_names_what_is_served(http: aiohttp.ClientSession, r: Rig):
    async with http.get(r.url + "/openapi.json") as response:
        document = await response.json()
    assert document["openapi"].startswith("3.1")
    for path, methods in document["paths"].items():
        for method in methods.keys() - {"parameters"}:
            async with http.request(method, r.url + path.replace("{name}", MODEL), data=b"{") as response:
                assert response.status in (200, 400), (method, path)
                assert str(response.status) in methods[method]["responses"]
    text = json.dumps(document)
    names = set(document["components"]["schemas"])
    for name in names:
        assert f"#/components/schemas/{name}" in text
    fields = document["components"]["schemas"]["ChatBody"]
    assert fields["additionalProperties"] is False
    assert {"messages", "temperature", "top_k", "timeout"} <= fields["properties"].keys()


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [
        ("GET", "/nothing", 404),
        ("GET", "/v1/completions", 405),
        ("POST", "/healthz", 405),
        ("DELETE", "/v1/models", 405),
    ],
)
async def test_wrong_paths_and_methods(http: aiohttp.ClientSession, r: Rig, method: str, path: str, status: int):
    async with http.request(method, r.url + path) as response:
        assert response.status == status
        error = (await response.json())["error"]
        assert error["message"]
        assert error["type"] == "invalid_request_error"
        assert status != 405 or response.headers["Allow"]


async def test_the_earlier_deadline_counts(http: aiohttp.ClientSession, r: Rig):
    r.prefills[0].behaviour.mute = True
    begun = time.monotonic()
    status, told, _ = await post(http, r, BODY | {"timeout": 300}, X_Request_Timeout_Ms="200")
    assert (status, told["error"]["code"]) == (504, "deadline_exceeded")
    status, _, _ = await post(http, r, BODY | {"timeout": 0.2}, X_Request_Timeout_Ms="300000")
    assert status == 504
    assert time.monotonic() - begun < 30


async def test_tokens_leave_at_once_and_each_frame_in_one_piece(r: Rig):
    """No Nagle stall (a delayed acknowledgement costs 40 ms), and no event in two writes."""
    for worker in r.workers:
        worker.behaviour.step_s = 0.01
    host, port = r.url.removeprefix("http://").split(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    body = json.dumps(BODY | {"stream": True, "max_tokens": 20}).encode()
    writer.write(
        b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
        b"Content-Length: %d\r\nConnection: close\r\n\r\n%b" % (len(body), body)
    )
    pieces: list[bytes] = []
    while piece := await reader.read(65536):
        pieces.append(piece)
    writer.close()
    events = [piece for piece in pieces if b"data: {" in piece]
    assert len(events) >= 10
    assert all(piece.endswith((b"\n\n\r\n", b"0\r\n\r\n")) for piece in events)
    assert pieces[0].startswith(b"HTTP/1.1 200 OK\r\n")
    assert b"data: {" in pieces[0], "the head waits for the first event"


async def test_accepted_connections_have_no_nagle(r: Rig, monkeypatch: pytest.MonkeyPatch):
    import aiohttp.web_protocol

    seen: list[int] = []
    made = aiohttp.web_protocol.RequestHandler.connection_made

    def watch(self: Any, transport: asyncio.Transport) -> None:
        made(self, transport)
        seen.append(transport.get_extra_info("socket").getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY))

    monkeypatch.setattr(aiohttp.web_protocol.RequestHandler, "connection_made", watch)
    async with aiohttp.ClientSession() as http, http.get(r.url + "/healthz") as response:
        assert response.status == 200
    assert seen
    assert all(seen)


async def test_a_client_that_does_not_read_is_cut_off_at_the_deadline(r: Rig):
    host, port = r.url.removeprefix("http://").split(":")
    body = BODY | {"stream": True, "max_tokens": 480, "n": 8, "logprobs": 20, "timeout": 1, "seed": 1}
    data, begun = json.dumps(body).encode(), False
    while not begun:  # on a busy machine the deadline may come before any token
        reader, writer = await asyncio.open_connection(host, int(port), limit=1024)
        writer.write(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n%b" % (len(data), data))
        begun = await reader.readexactly(12) == b"HTTP/1.1 200"
        await until(lambda: r.router.frontend.admission.running == 0)
        writer.close()


async def test_the_way_out(http: aiohttp.ClientSession, r: Rig):
    """Running answers are finished; new ones are refused so that their clients go elsewhere."""
    r.prefills[0].behaviour.mute = True
    open_connections = [http.get(r.url + "/healthz") for _ in range(2)]
    for response in await asyncio.gather(*open_connections):
        await response.read()
    running = asyncio.create_task(post(http, r, BODY | {"max_tokens": 20}))
    await until(lambda: r.router.hub.listening_for > 0)
    await r.router.stop_intake()
    assert r.router.frontend.admission.running == 1
    with pytest.raises(aiohttp.ClientConnectionError):
        async with aiohttp.ClientSession() as other:
            await other.get(r.url + "/healthz")
    status, _, headers = await post(http, r)
    assert (status, headers["x-should-retry"]) == (503, "true")
    r.prefills[0].behaviour.mute = False
    assert (await running)[0] == 200
    await asyncio.wait_for(r.router.frontend.admission.wait_idle(), 30)


async def test_a_long_prompt_does_not_hold_up_the_loop(
    http: aiohttp.ClientSession, r: Rig, monkeypatch: pytest.MonkeyPatch
):
    threads: list[threading.Thread] = []
    at_least = Tokenizer.at_least
    monkeypatch.setattr(
        Tokenizer, "at_least", lambda self, text: threads.append(threading.current_thread()) or at_least(self, text)
    )
    assert (await post(http, r, BODY | {"prompt": "x" * 60_000}))[0] == 400
    assert threads
    assert threading.main_thread() not in threads


async def test_loading_a_version_is_bounded_by_the_deadline(r: Rig):
    with pytest.raises(Exception, match=r"version|deadline"):
        await r.router.frontend.models.get(b"?" * 32, Deadline.after(0.2))
