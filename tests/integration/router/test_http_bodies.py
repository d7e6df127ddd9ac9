"""What can be wrong with the head and the body of a request: each is answered, and costs no more than itself."""

from __future__ import annotations

import asyncio
import gzip
import json

import aiohttp
import pytest

from tests.support.http_front import BODY, post
from tests.support.router_rig import Rig, rig

VERSIONS = 2
"""Of the rig `r`."""


@pytest.mark.parametrize("body", [b"", b"{", b"\xff\xfe", b"[]", b'{"model": NaN}', b"[" * 5000, b'{"model":"toy"'])
async def test_broken_bodies(http: aiohttp.ClientSession, r: Rig, body: bytes):
    for path in ("/v1/completions", "/v1/chat/completions"):
        status, told, _ = await post(http, r, body, path)
        assert status == 400
        assert told["error"]["type"] == "invalid_request_error"


async def test_a_body_that_is_too_large(http: aiohttp.ClientSession):
    async with rig(max_body_bytes=2048) as r:
        status, told, _ = await post(http, r, BODY | {"prompt": "x" * 3000})
        assert status == 413
        assert told["error"]["message"]


async def test_a_body_that_unpacks_to_too_much(http: aiohttp.ClientSession, r: Rig):
    bomb = gzip.compress(b"[" + b" " * 50_000_000)
    status, _, _ = await post(http, r, bomb, Content_Encoding="gzip")
    assert status == 413


async def test_a_packed_body(http: aiohttp.ClientSession, r: Rig):
    status, _, _ = await post(http, r, gzip.compress(json.dumps(BODY).encode()), Content_Encoding="gzip")
    assert status == 200


@pytest.mark.parametrize("body", [b"nope", gzip.compress(json.dumps(BODY).encode())[:-9]], ids=["no gzip", "cut off"])
async def test_a_body_whose_compression_is_broken(http: aiohttp.ClientSession, r: Rig, body: bytes):
    status, told, _ = await post(http, r, body, Content_Encoding="gzip")
    assert status == 400
    assert told["error"]["code"] == "invalid_request"


@pytest.mark.parametrize("encoding", ["br", "zstd", "foo"])
async def test_an_encoding_that_is_not_served(http: aiohttp.ClientSession, r: Rig, encoding: str):
    status, told, _ = await post(http, r, b"nope", Content_Encoding=encoding)
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
    status, _, _ = await post(http, r, b'{"model":"toy","prompt":"\\ud800"}')
    assert status == 400


@pytest.mark.parametrize("value", ["0", "-1", "x", "1.5", "9" * 30])
async def test_an_unusable_timeout(http: aiohttp.ClientSession, r: Rig, value: str):
    status, told, _ = await post(http, r, X_Request_Timeout_Ms=value)
    assert status == 400
    assert told["error"]["param"] == "X-Request-Timeout-Ms"


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
