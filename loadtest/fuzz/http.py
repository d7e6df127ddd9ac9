"""HTTP requests: grown from the router's own OpenAPI document, then spoiled at every layer; on a real socket."""

from __future__ import annotations

import gzip
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from random import Random
from typing import Any
from urllib.parse import quote, urlsplit

from loadtest.fuzz.http_wire import Connection, Reply
from loadtest.fuzz.noise import damaged, nested, spoiled, text, tree
from loadtest.fuzz.schema import Schemas
from loadtest.fuzz.twin import MODEL, Twin, twin

_METHODS = ("GET", "POST", "PUT", "DELETE", "HEAD", "OPTIONS", "PATCH", "TRACE", "CONNECT", "FOO", "G\0T")
HEADERS = {
    "X-Request-Timeout-Ms": ("1", "0", "-1", "50", "999999999", "9" * 30, "1.5", "NaN", "１"),
    "Cache-Control": ("no-store", "no-cache", "max-age=0", "max-age=-1", "max-age=" + "9" * 40, ",,=,=", "max-age"),
    "Idempotency-Key": ("k", "", "x" * 255, "x" * 256, "\xff\xfe", "a b"),
    "X-Session-Id": ("s", "\xff", "x" * 8000),
    "Authorization": ("Bearer x", "Basic eDp5", "Bearer", "", "\xff"),
    "Content-Type": ("application/json", "text/plain", "multipart/form-data; boundary=x", "a/b; charset=x", "/"),
    "Content-Encoding": ("identity", "gzip", "br", "deflate", "gzip, gzip", "\xff"),
    "Expect": ("100-continue", "200-ok"),
    "Connection": ("close", "keep-alive", "upgrade"),
    "Upgrade": ("h2c", "websocket"),
    "traceparent": ("00-" + "a" * 32 + "-" + "b" * 16 + "-01", "00-xx", "\xff" * 55),
    "baggage": ("a=b", "=" * 100, "a=" + "%" * 1000),
    "Host": ("x", "", "a:b:c"),
    "Cookie": ("a=b", ";;;"),
    "Range": ("bytes=0-1",),
    "If-None-Match": ("*",),
}  # fmt: skip
_OWN: dict[str, tuple[Any, ...]] = {
    "model": (MODEL, MODEL, MODEL, MODEL, MODEL, f"{MODEL}@stable", f"{MODEL}@none", "other"),
    "max_tokens": (1, 2, 8),
    "max_completion_tokens": (None,),
    "n": (1, 1, 2, None),
    "best_of": (1, None),
    "timeout": (1, 5, 30, None),
    "tool_calls": ([], None),
    "stream_options": (None,),
    "top_logprobs": (None,),
    "suffix": ("", None),
    "min_tokens": (0, None),
    "stop_token_ids": ([1, 2], [], None),
    "logit_bias": ({"5": 1.0}, {}, None),
    "prompt": ("x", ["x", "y"], [1, 2, 3], [[1], [2]], "a longer prompt " * 20),
    "role": ("user", "assistant", "system", "developer"),
    "content": ("x", "", "ä😀", [{"type": "text", "text": "x"}]),
    "stream": (True, False, None),
    "tools": ([], None),
}


class Http:
    width = 8

    def __init__(self, twin: Twin) -> None:
        at = urlsplit(twin.router.http.url)
        self._twin = twin
        self._idle = [Connection(at.hostname or "", at.port or 0) for _ in range(self.width)]
        self._operations: list[tuple[str, str, Any]] = []

    async def learn(self) -> None:
        """What is served, from the document that is."""
        reply = await self._idle[0].ask(request_bytes("GET", "/openapi.json", {}, b""), ends=False)
        assert reply is not None
        document = json.loads(reply.body)
        self._schemas = Schemas(document, _OWN)
        for path, item in document["paths"].items():
            for method, operation in item.items():
                if method in ("get", "post"):
                    body = operation.get("requestBody", {}).get("content", {}).get("application/json", {}).get("schema")
                    self._operations.append((method.upper(), path, body))
        self._posts = [each for each in self._operations if each[2]]

    async def one(self, rng: Random) -> bool:
        request, sound = self._draw(rng)
        connection = self._idle.pop()
        try:
            reply = await connection.ask(request, ends=not sound)
        except BaseException:
            connection.close()
            raise
        finally:
            self._idle.append(connection)
        assert reply is not None or not sound, f"no answer to a sound head: {request[:300]!r}"
        return reply is not None and self._judged(reply, request)

    async def ends(self) -> None:
        await self._twin.until_idle()
        body = {"model": MODEL, "prompt": "x", "max_tokens": 4}
        headers = {"Content-Type": "application/json"}
        reply = await self._idle[0].ask(
            request_bytes("POST", "/v1/completions", headers, json.dumps(body).encode()), ends=False
        )
        assert getattr(reply, "status", None) == 200, f"a good request is answered by {reply}"
        for connection in self._idle:
            connection.close()

    def _draw(self, rng: Random) -> tuple[bytes, bool]:
        """A request, and whether its head is sound, so that an answer must come."""
        method, path, schema = rng.choice(self._posts if rng.random() < 0.8 else self._operations)
        path = path.replace("{name}", quote(text(rng), safe="") or "x")
        body = self._body(rng, schema) if schema else (b"" if rng.random() < 0.8 else b"{}")
        headers = {"Content-Type": "application/json"}
        for name in rng.sample(list(HEADERS), rng.choice((0, 0, 0, 1, 2, 4))):
            headers[name] = rng.choice(HEADERS[name])
        if headers.get("Content-Encoding") == "gzip" and rng.random() < 0.8:
            body = gzip.compress(body, 1)
            body = damaged(rng, body) if rng.random() < 0.5 else body
        if rng.random() < 0.05:
            method = rng.choice(_METHODS)
        if rng.random() < 0.05:
            path = rng.choice(
                (
                    "/",
                    "//",
                    "/v1",
                    "*",
                    "/v1/models/" + "x" * 9000,
                    "/%",
                    "/v1/../metrics",
                    "http://x/",
                    path + "?a=%zz",
                )
            )
        whole = request_bytes(method, path, headers, body, chunked=rng.random() < 0.05)
        if rng.random() < 0.1:
            return damaged(rng, whole), False
        odd = method not in ("GET", "POST") or {"Upgrade", "Expect", "Host"} & headers.keys() or "\xff" in str(headers)
        return whole, not odd and path.startswith("/v1") and len(whole) < 8000

    def _judged(self, reply: Reply, request: bytes) -> bool:
        """Whether it was accepted. Raises AssertionError for an answer that no request may get."""
        shown = request[:2000]
        assert reply.status < 500 or reply.status in (502, 503, 504), f"{reply.status}: {reply.body!r} to {shown!r}"
        if reply.status < 400:
            for line in reply.body.splitlines():
                assert b'"internal_error"' not in line, f"{line!r} to {shown!r}"
            return True
        if reply.headers.get("content-type", "").startswith("application/json") and reply.body:
            error = json.loads(reply.body)
            assert "error" not in error or len(error["error"]["message"]) < 2000, f"a long message to {shown!r}"
        return False

    def _body(self, rng: Random, schema: Any) -> bytes:
        value = self._schemas.of(rng, schema)
        if "prompt" in value or "messages" in value:
            value.setdefault("max_tokens", rng.choice((1, 2, 8)))  # to the end of the context takes long
        for _ in range(rng.choice((0, 0, 0, 0, 0, 1, 2))):
            value = spoiled(rng, value, lambda r: nested(r) if r.random() < 0.05 else tree(r, False, 2))
        whole = json.dumps(value).encode()
        return damaged(rng, whole) if rng.random() < 0.15 else whole


def request_bytes(method: str, path: str, headers: dict[str, str], body: bytes, *, chunked: bool = False) -> bytes:
    sent = {"Host": "localhost", **headers}
    if chunked:
        sent["Transfer-Encoding"] = "chunked"
        body = b"%x\r\n%b\r\n0\r\n\r\n" % (len(body), body) if body else b"0\r\n\r\n"
    else:
        sent["Content-Length"] = str(len(body))
    head = "".join(f"{name}: {value}\r\n" for name, value in sent.items())
    return f"{method} {path} HTTP/1.1\r\n{head}\r\n".encode("utf-8", "replace") + body


@asynccontextmanager
async def http(_: Path) -> AsyncIterator[Http]:
    async with twin() as made:
        fuzzer = Http(made)
        await fuzzer.learn()
        yield fuzzer
