"""The HTTP front: pages, raw errors, caching headers, idempotency, versions, how bytes leave, and the way out."""

from __future__ import annotations

import asyncio
import gzip
import json
import socket
import threading
import time
from collections.abc import AsyncIterator
from typing import Any

import aiohttp
import pytest
from prometheus_client.parser import text_string_to_metric_families

from pdbus.bus.bus import memory_bus
from pdbus.context import Deadline, RequestContext
from pdbus.messages.router import RefStatsWanted
from pdbus.router.tokenizer import Tokenizer
from pdbus.subjects import REF_STATS
from tests.support.router_rig import MODEL, Rig, rig, until

BODY: dict[str, Any] = {"model": MODEL, "prompt": "hi", "max_tokens": 8, "temperature": 0}


@pytest.fixture
async def r() -> AsyncIterator[Rig]:
    async with rig(versions=2) as made:
        yield made
        await made.until_idle()


@pytest.fixture
async def http() -> AsyncIterator[aiohttp.ClientSession]:
    async with aiohttp.ClientSession() as session:
        yield session


async def _post(
    http: aiohttp.ClientSession, r: Rig, body: Any = BODY, path: str = "/v1/completions", **headers: str
) -> tuple[int, dict[str, Any], Any]:
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    sent = {name.replace("_", "-"): value for name, value in headers.items()}
    async with http.post(r.url + path, data=data, headers={"Content-Type": "application/json"} | sent) as response:
        return response.status, await response.json(), response.headers


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


@pytest.mark.parametrize("body", [b"", b"{", b"\xff\xfe", b"[]", b'{"model": NaN}', b"[" * 5000, b'{"model":"toy"'])
async def test_broken_bodies(http: aiohttp.ClientSession, r: Rig, body: bytes):
    for path in ("/v1/completions", "/v1/chat/completions"):
        status, told, _ = await _post(http, r, body, path)
        assert status == 400
        assert told["error"]["type"] == "invalid_request_error"


async def test_a_body_that_is_too_large(http: aiohttp.ClientSession):
    async with rig(max_body_bytes=2048) as r:
        status, told, _ = await _post(http, r, BODY | {"prompt": "x" * 3000})
        assert status == 413
        assert told["error"]["message"]


async def test_a_body_that_unpacks_to_too_much(http: aiohttp.ClientSession, r: Rig):
    bomb = gzip.compress(b"[" + b" " * 50_000_000)
    status, _, _ = await _post(http, r, bomb, Content_Encoding="gzip")
    assert status == 413


async def test_a_packed_body(http: aiohttp.ClientSession, r: Rig):
    status, _, _ = await _post(http, r, gzip.compress(json.dumps(BODY).encode()), Content_Encoding="gzip")
    assert status == 200


@pytest.mark.parametrize("body", [b"nope", gzip.compress(json.dumps(BODY).encode())[:-9]], ids=["no gzip", "cut off"])
async def test_a_body_whose_compression_is_broken(http: aiohttp.ClientSession, r: Rig, body: bytes):
    status, told, _ = await _post(http, r, body, Content_Encoding="gzip")
    assert status == 400
    assert told["error"]["code"] == "invalid_request"


@pytest.mark.parametrize("encoding", ["br", "zstd", "foo"])
async def test_an_encoding_that_is_not_served(http: aiohttp.ClientSession, r: Rig, encoding: str):
    status, told, _ = await _post(http, r, b"nope", Content_Encoding=encoding)
    assert status == 415
    assert encoding in told["error"]["message"]


async def test_a_body_that_never_comes(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("pdbus.router.http_body.BODY_S", 0.3)
    async with rig() as r, asyncio.timeout(30):
        host, port = r.url.removeprefix("http://").split(":")
        reader, writer = await asyncio.open_connection(host, int(port))
        writer.write(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 10\r\n\r\n{")
        assert (await reader.readline()).split()[1] == b"408"
        writer.close()


async def test_a_large_body_is_refused_before_it_is_sent(r: Rig):
    async with asyncio.timeout(30):
        host, port = r.url.removeprefix("http://").split(":")
        reader, writer = await asyncio.open_connection(host, int(port))
        writer.write(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 100000000\r\n\r\n")
        assert (await reader.readline()).split()[1] == b"413"
        writer.close()


@pytest.mark.parametrize("dripping", [False, True])
async def test_a_head_that_never_ends_is_cut_off(monkeypatch: pytest.MonkeyPatch, dripping: bool):
    monkeypatch.setattr("pdbus.router.http._IDLE_S", 0.5)
    async with rig() as r, asyncio.timeout(30):
        host, port = r.url.removeprefix("http://").split(":")
        reader, writer = await asyncio.open_connection(host, int(port))
        writer.write(b"GET /healthz HTTP/1.1\r\nHost: x\r\n")
        ended = asyncio.ensure_future(reader.read())
        while not ended.done():
            if dripping:
                writer.write(b"X-More: x\r\n")
            await asyncio.wait([ended], timeout=0.1)
        writer.close()
        assert isinstance(ended.exception(), ConnectionError) or ended.result() == b""


async def test_lone_surrogates_are_no_text(http: aiohttp.ClientSession, r: Rig):
    status, _, _ = await _post(http, r, b'{"model":"toy","prompt":"\\ud800"}')
    assert status == 400


@pytest.mark.parametrize("value", ["0", "-1", "x", "1.5", "9" * 30])
async def test_an_unusable_timeout(http: aiohttp.ClientSession, r: Rig, value: str):
    status, told, _ = await _post(http, r, X_Request_Timeout_Ms=value)
    assert status == 400
    assert told["error"]["param"] == "X-Request-Timeout-Ms"


async def test_the_earlier_deadline_counts(http: aiohttp.ClientSession, r: Rig):
    r.prefills[0].behaviour.mute = True
    begun = time.monotonic()
    status, told, _ = await _post(http, r, BODY | {"timeout": 300}, X_Request_Timeout_Ms="200")
    assert (status, told["error"]["code"]) == (504, "deadline_exceeded")
    status, _, _ = await _post(http, r, BODY | {"timeout": 0.2}, X_Request_Timeout_Ms="300000")
    assert status == 504
    assert time.monotonic() - begun < 30


async def test_a_greedy_answer_comes_from_the_cache_the_second_time(http: aiohttp.ClientSession, r: Rig):
    body = BODY | {"logprobs": 2, "echo": True, "stop": ["zz"]}
    _, first, headers = await _post(http, r, body)
    assert headers["X-Result-Cache"] == "miss"
    _, second, headers = await _post(http, r, body)
    assert headers["X-Result-Cache"] == "hit"
    assert second["choices"] == first["choices"]
    assert second["usage"]["completion_tokens"] == first["usage"]["completion_tokens"]
    assert second["usage"]["prompt_tokens_details"]["cached_tokens"] == second["usage"]["prompt_tokens"]
    assert len(r.prefills[0].tickets) == 1


async def test_whole_and_streamed_answers_share_an_entry(http: aiohttp.ClientSession, r: Rig):
    _, whole, _ = await _post(http, r)
    async with http.post(r.url + "/v1/completions", json=BODY | {"stream": True}) as response:
        assert response.headers["X-Result-Cache"] == "hit"
        lines = (await response.text()).split("\n\n")
    assert json.loads(lines[0][6:])["choices"][0]["text"] == whole["choices"][0]["text"]
    assert lines[-2:] == ["data: [DONE]", ""]


@pytest.mark.parametrize(
    ("change", "source"),
    [({"temperature": 1}, "bypass"), ({"temperature": 1, "seed": 3}, "miss"), ({"temperature": None}, "bypass")],
)
async def test_only_greedy_and_seeded_answers_are_kept(http: aiohttp.ClientSession, r: Rig, change: Any, source: str):
    for expected in (source, "hit" if source == "miss" else "bypass"):
        _, _, headers = await _post(http, r, BODY | change)
        assert headers["X-Result-Cache"] == expected


async def test_cache_control(http: aiohttp.ClientSession, r: Rig):
    await _post(http, r, Cache_Control="no-store")
    assert not r.ring.entries
    await _post(http, r, Cache_Control="no-cache")
    assert len(r.ring.entries) == 1
    assert r.ring.gets == 0
    await _post(http, r, Cache_Control="max-age=7")
    assert r.ring.max_ages == [7]


async def test_nothing_but_whole_answers_is_kept(http: aiohttp.ClientSession, r: Rig):
    for worker in r.workers:
        worker.behaviour.step_s = 0.02
    async with http.post(r.url + "/v1/completions", json=BODY | {"max_tokens": 200, "stream": True}) as response:
        await response.content.readline()
        response.close()
    await r.until_idle()
    await _post(http, r, BODY | {"max_tokens": 200, "timeout": 0.2})
    await r.until_idle()
    assert not r.ring.entries


async def test_answers_of_another_version_are_never_taken(http: aiohttp.ClientSession, r: Rig):
    """G4."""
    await _post(http, r)
    r.versions.move("stable", r.roots[1])
    _, answer, headers = await _post(http, r)
    assert headers["X-Result-Cache"] == "miss"
    assert answer["system_fingerprint"] == "root-" + r.roots[1].hex()
    r.versions.move("stable", r.roots[0])
    _, _, headers = await _post(http, r)
    assert headers["X-Result-Cache"] == "hit"


async def test_versions_are_asked_for_by_ref_root_and_fingerprint(http: aiohttp.ClientSession, r: Rig):
    r.versions.move("canary", r.roots[1])
    for name in ("canary", r.roots[1].hex(), r.roots[1].hex()[:12], "root-" + r.roots[1].hex()):
        _, answer, _ = await _post(http, r, BODY | {"model": f"{MODEL}@{name}"})
        assert answer["system_fingerprint"] == "root-" + r.roots[1].hex()
        assert answer["model"] == f"{MODEL}@{name}"
    assert {ticket.root for ticket in r.prefills[0].tickets} == {r.roots[1]}


async def test_what_requests_met_is_told_by_ref_and_version(http: aiohttp.ClientSession, r: Rig):
    """By this a canary is held against stable."""
    r.versions.move("canary", r.roots[1])
    for ref, count in (("stable", 1), ("canary", 2), (r.roots[0].hex(), 1)):
        for number in range(count):
            await _post(http, r, BODY | {"model": f"{MODEL}@{ref}", "prompt": f"{ref} {number}"})
    r.versions.move("stable", r.roots[1])
    for _ in range(2):
        await _post(http, r)
    async with memory_bus(r.broker) as bus:
        told = await bus.call(REF_STATS(router="r-0"), RefStatsWanted(), RequestContext.after(30))
    found = {(figures.ref, figures.root): figures for figures in told.refs}
    assert {key: figures.requests for key, figures in found.items()} == {
        ("stable", r.roots[0]): 1,
        ("canary", r.roots[1]): 2,
        ("(version)", r.roots[0]): 1,
        ("stable", r.roots[1]): 2,
    }
    assert len(found["canary", r.roots[1]].first_token_s) == len(found["canary", r.roots[1]].per_token_s) == 2
    assert len(found["stable", r.roots[1]].first_token_s) == 1, "the other came out of the result cache"
    assert not any(figures.errors for figures in told.refs)


async def test_without_a_confirmed_log_no_ref_is_served(http: aiohttp.ClientSession, r: Rig):
    """G3: rather refuse than serve an older version; a request that names its root is not concerned."""
    r.versions.confirmed_age_s = 5.1
    for model in (MODEL, f"{MODEL}@stable"):
        status, told, headers = await _post(http, r, BODY | {"model": model})
        assert (status, told["error"]["code"]) == (503, "unavailable")
        assert headers["x-should-retry"] == "true"
    async with http.get(r.url + "/readyz") as response:
        assert response.status == 503
    status, _, _ = await _post(http, r, BODY | {"model": f"{MODEL}@{r.roots[0].hex()}"})
    assert status == 200
    r.versions.confirmed_age_s = 1.0
    assert (await _post(http, r))[0] == 200


async def test_a_ref_that_moves_while_a_request_waits_is_followed(http: aiohttp.ClientSession):
    async with rig(versions=2, max_inflight=1) as r:
        for worker in r.workers:
            worker.behaviour.step_s = 0.02
        first = asyncio.create_task(_post(http, r, BODY | {"prompt": "first", "max_tokens": 20}))
        await until(lambda: bool(r.prefills[0].tickets))
        waiting = asyncio.create_task(_post(http, r))
        await until(lambda: r.router.frontend.admission.waiting > 0)
        r.versions.move("stable", r.roots[1])
        assert (await first)[1]["system_fingerprint"] == "root-" + r.roots[0].hex()
        assert (await waiting)[1]["system_fingerprint"] == "root-" + r.roots[1].hex()


async def test_the_same_idempotency_key_gives_the_same_answer(http: aiohttp.ClientSession, r: Rig):
    body = BODY | {"temperature": 1}
    answers = await asyncio.gather(*(_post(http, r, body, Idempotency_Key="k") for _ in range(3)))
    assert len({json.dumps(answer["choices"]) for _, answer, _ in answers}) == 1
    assert len(r.prefills[0].tickets) == 1, "worked out once"
    _, other, _ = await _post(http, r, body, Idempotency_Key="l")
    assert other["choices"] != answers[0][1]["choices"]
    status, told, _ = await _post(http, r, body | {"prompt": "another"}, Idempotency_Key="k")
    assert (status, told["error"]["code"]) == (409, "conflict")


async def test_an_invalid_request_leaves_its_idempotency_key_free(http: aiohttp.ClientSession, r: Rig):
    for _ in range(2):
        refused = [_post(http, r, BODY | {"max_tokens": 10**6}, Idempotency_Key="k") for _ in range(3)]
        assert {status for status, _, _ in await asyncio.gather(*refused)} == {400}
    status, _, _ = await _post(http, r, Idempotency_Key="k")
    assert status == 200
    status, _, _ = await _post(http, r, BODY | {"max_tokens": 10**6}, Idempotency_Key="k")
    assert status == 409, "used by now"


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


@pytest.mark.parametrize("name", ["traceparent", "tracestate", "baggage", "Cache-Control"])
async def test_a_header_that_is_no_text_is_not_heeded(r: Rig, name: str):
    assert b" 200 " in await _raw_header(r, name.encode() + b": \xff=\xfe")


async def test_an_idempotency_key_that_is_no_text_is_refused(r: Rig):
    told = await _raw_header(r, b"Idempotency-Key: \xff")
    assert b" 400 " in told
    assert b"UTF-8" in told


async def _raw_header(r: Rig, header: bytes) -> bytes:
    host, port = r.url.removeprefix("http://").split(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    data = json.dumps(BODY | {"temperature": 1}).encode()
    head = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nConnection: close\r\nContent-Length: %d\r\n%b\r\n\r\n"
    writer.write(head % (len(data), header) + data)
    told = await reader.read()
    writer.close()
    return told


async def test_a_client_that_does_not_read_is_cut_off_at_the_deadline(r: Rig):
    host, port = r.url.removeprefix("http://").split(":")
    _, writer = await asyncio.open_connection(host, int(port), limit=1024)
    body = BODY | {"stream": True, "max_tokens": 480, "n": 8, "logprobs": 20, "timeout": 1, "seed": 1}
    data = json.dumps(body).encode()
    writer.write(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n%b" % (len(data), data))
    await until(lambda: len(r.prefills[0].tickets) == 8)
    await until(lambda: r.router.frontend.admission.running == 0)
    writer.close()


async def test_the_way_out(http: aiohttp.ClientSession, r: Rig):
    """Running answers are finished; new ones are refused so that their clients go elsewhere."""
    for worker in r.workers:
        worker.behaviour.step_s = 0.02
    open_connections = [http.get(r.url + "/healthz") for _ in range(2)]
    for response in await asyncio.gather(*open_connections):
        await response.read()
    running = asyncio.create_task(_post(http, r, BODY | {"max_tokens": 20}))
    await until(lambda: r.router.hub.listening_for > 0)
    await r.router.stop_intake()
    assert r.router.frontend.admission.running == 1
    with pytest.raises(aiohttp.ClientConnectionError):
        async with aiohttp.ClientSession() as other:
            await other.get(r.url + "/healthz")
    status, _, headers = await _post(http, r)
    assert (status, headers["x-should-retry"]) == (503, "true")
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
    assert (await _post(http, r, BODY | {"prompt": "x" * 60_000}))[0] == 400
    assert threads
    assert threading.main_thread() not in threads


async def test_loading_a_version_is_bounded_by_the_deadline(r: Rig):
    with pytest.raises(Exception, match=r"version|deadline"):
        await r.router.frontend.models.get(b"?" * 32, Deadline.after(0.2))
