"""Jobs, batches and files over HTTP, forms in many parts among them; of a router on a real nats-server."""

from __future__ import annotations

import json
from collections import deque
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from random import Random
from urllib.parse import quote

from loadtest.fuzz.forms import batch_file
from loadtest.fuzz.http import HEADERS, Http, request_bytes
from loadtest.fuzz.http_wire import Reply
from loadtest.fuzz.noise import damaged, text
from loadtest.fuzz.twin import twin
from pdbus.stack.nats_server import embedded_nats

_QUERIES = ("", "?wait=0", "?wait=1", "?wait=-1", "?wait=9999", "?wait=%D9%A3", "?limit=1", "?limit=0", "?limit=x",
            "?after=x", "?after=", "?order=asc", "?order=up", "?purpose=batch&limit=2", "?a=%zz&a",
            "?limit=1&limit=2")  # fmt: skip
_KINDS = {"job": "/v1/jobs", "batch": "/v1/batches", "file": "/v1/files"}
_KEPT = 16
"""Files, batches and jobs of which the ids are remembered; older files are deleted, since a tenant may have so many."""
_BOUNDARY = "x" * 20
_NAMES = ("file", "file", "file", "purpose", "expires_after[anchor]", "expires_after[seconds]", "", "é", "_charset_")
_PART_HEADERS = ("Content-Type: multipart/mixed; boundary=y", "Content-Transfer-Encoding: base64",
                 "Content-Transfer-Encoding: odd", "Content-Encoding: gzip", "Content-Encoding: odd",
                 "Content-Length: 3", "Content-Length: x", "Content-Disposition: x", "X: " + "y" * 9000, "no colon",
                 ": empty", "Content-Type: text/plain; charset=odd", "X: \xff\xfe", " folded: x")  # fmt: skip
_FILE_NAMES = ('filename="in.jsonl"', 'filename="in.jsonl"', "filename*=UTF-8''%C3%A4", "filename*=odd''%ff",
               "filename*=x", 'filename="../../x"', 'filename="' + "x" * 999 + '"', 'filename="\0"', "filename",
               "")  # fmt: skip


class Jobs(Http):
    async def learn(self) -> None:
        await super().learn()
        kinds = tuple(_KINDS.values())
        self._operations = [operation for operation in self._operations if operation[1].startswith(kinds)]
        self._ids = {kind: deque(["none"], _KEPT) for kind in kinds}

    async def ends(self) -> None:
        jobs = self._twin.router.jobs
        assert jobs is not None
        await jobs.stop_intake()
        await super().ends()

    def _draw(self, rng: Random) -> tuple[bytes, bool]:
        files = self._ids["/v1/files"]
        if len(files) == _KEPT:
            return request_bytes("DELETE", f"/v1/files/{files.popleft()}", {}, b""), True
        method, path, schema = rng.choice(self._operations)
        kind = "/".join(path.split("/")[:3])
        known = rng.choice(self._ids[kind]) if rng.random() < 0.9 else text(rng)
        path = path.replace("{id}", quote(known, safe="") or "x")
        headers = {"Content-Type": "application/json"}
        body = self._body(rng, schema) if schema else b""
        if method == "POST" and path == "/v1/files":
            headers["Content-Type"] = f"multipart/form-data; boundary={_BOUNDARY}"
            body = _form(rng)
        elif method != "POST" and rng.random() < 0.3:
            path += rng.choice(_QUERIES)
        for name in rng.sample(list(HEADERS), rng.choice((0, 0, 0, 0, 1, 2))):
            headers[name] = rng.choice(HEADERS[name])
        odd = {"Upgrade", "Expect", "Host"} & headers.keys() or "\xff" in str(headers)
        whole = request_bytes(method, path, headers, body, chunked=rng.random() < 0.1)
        if rng.random() < 0.05:
            return damaged(rng, whole), False
        return whole, not odd and len(whole) < 8000

    def _body(self, rng: Random, schema: object) -> bytes:
        body = super()._body(rng, schema)
        if rng.random() < 0.7 and b"input_file_id" in body:
            try:
                return json.dumps(json.loads(body) | {"input_file_id": rng.choice(self._ids["/v1/files"])}).encode()
            except (ValueError, TypeError):
                pass
        return body

    def _judged(self, reply: Reply, request: bytes) -> bool:
        accepted = super()._judged(reply, request)
        if accepted and request.startswith(b"POST") and reply.headers.get("content-type") == "application/json":
            made = json.loads(reply.body)
            self._ids[{"file": "/v1/files", "batch": "/v1/batches", "job": "/v1/jobs"}[made["object"]]].append(
                made["id"]
            )
        return accepted


def _form(rng: Random) -> bytes:
    sound = rng.random() < 0.4
    names = ["file", "purpose"] if sound else [rng.choice(_NAMES) for _ in range(rng.choice((0, 1, 2, 2, 3, 12)))]
    body = b"".join(_part(rng, name, sound) for name in names) + f"--{_BOUNDARY}--\r\n".encode()
    return damaged(rng, body) if rng.random() < 0.2 else body


def _part(rng: Random, name: str, sound: bool) -> bytes:
    content = {
        "file": batch_file(rng)[0],
        "purpose": b"batch" if sound else rng.choice((b"batch", b"batch", b"x", b"", b"x" * 300)),
        "expires_after[anchor]": rng.choice((b"created_at", b"x")),
        "expires_after[seconds]": rng.choice((b"3600", b"-1", b"9" * 40, b"\xd9\xa3")),
    }.get(name, text(rng).encode("utf-8", "replace"))
    head = f'Content-Disposition: form-data; name="{name}"'
    if name == "file":
        head += "; " + (_FILE_NAMES[0] if sound else rng.choice(_FILE_NAMES))
    if not sound and rng.random() < 0.4:
        head = "\r\n".join((head, *rng.sample(_PART_HEADERS, rng.randrange(1, 3))))
    return f"--{_BOUNDARY}\r\n{head}\r\n\r\n".encode("utf-8", "replace") + content + b"\r\n"


@asynccontextmanager
async def jobs(folder: Path) -> AsyncIterator[Jobs]:
    async with embedded_nats(folder / "nats") as nats, twin(nats.url) as made:
        fuzzer = Jobs(made)
        await fuzzer.learn()
        yield fuzzer
