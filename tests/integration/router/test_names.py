"""Names that mean more elsewhere (wildcards and levels of subjects, folders, bytes that are no text) find nothing."""

from __future__ import annotations

from collections.abc import Callable
from urllib.parse import quote

import aiohttp
import openai
from yarl import URL

from pdbus.client import Client
from tests.support.router_rig import rig

NAMES = ("*", ">", "*.*", "../x", "a.b", "\r\nPUB x 0\0", "é" * 128)
PLAIN = ("%ff", "%ed%a0%80", "x" * 5000)
"""As they stand in the path."""


async def test_an_id_that_would_be_a_wildcard_finds_nothing(nats_url: str, unique: Callable[[str], str]) -> None:
    """`DELETE /v1/files/*` must not delete every file, nor `GET /v1/jobs/*` tell of any job."""
    model = unique("names")
    async with rig(nats_url=nats_url, model=model) as r, aiohttp.ClientSession() as http:
        client = Client(r.bus, model, timeout_s=30)
        job = await client.jobs.submit("completions", {"prompt": "x", "max_tokens": 1, "temperature": 1})
        await client.jobs.result(job.id, wait_s=30)
        async with openai.AsyncOpenAI(base_url=f"{r.url}/v1", api_key="any", max_retries=0) as own:
            file = await own.files.create(file=("in.jsonl", b"{}"), purpose="batch")
            for name in (*(quote(name, safe="") for name in NAMES), *PLAIN):
                for method, path in (
                    ("GET", "jobs/{}"), ("DELETE", "jobs/{}"), ("POST", "batches/{}/cancel"),
                    ("GET", "files/{}/content"), ("DELETE", "files/{}"), ("GET", "models/{}"),
                ):  # fmt: skip
                    url = URL(f"{r.url}/v1/{path.format(name)}", encoded=True)
                    async with http.request(method, url) as got:
                        assert got.status in (400, 404, 405), (method, path, name, await got.text())
            assert (await own.files.content(file.id)).content == b"{}"
            asked = {"input_file_id": "*", "endpoint": "/v1/completions", "completion_window": "24h"}
            async with http.post(f"{r.url}/v1/batches", json=asked) as got:
                assert got.status == 404
        assert (await client.jobs.state(job.id)).final
        assert r.bus.transport.connected, "no name ends the connection"
