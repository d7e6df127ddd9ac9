"""The feature cache and the flights of its misses, between two tenants."""

from __future__ import annotations

import asyncio
from pathlib import Path

import aiohttp

from pdbus import keyfile
from tests.support.encoder_rig import MODEL, encoder_rig
from tests.support.router_rig import until
from tests.support.workers import LocalSource


async def test_a_text_of_another_is_neither_found_nor_waited_for(encoders: LocalSource, tmp_path: Path) -> None:
    file = tmp_path / "keys.json"
    a, b = (keyfile.add(file, name).text for name in ("a", "b"))
    async with encoder_rig(encoders, keys_file=file) as r, aiohttp.ClientSession(r.url) as http:

        async def embed(key: str | None, text: str = "a text") -> tuple[int, str]:
            headers = {} if key is None else {"Authorization": f"Bearer {key}"}
            body = {"model": MODEL, "input": text}
            async with http.post("/v1/embeddings", json=body, headers=headers) as response:
                return response.status, response.headers.get("X-Feature-Cache", "")

        assert await embed(None) == (401, "")
        hit, miss = (200, "hits=1, misses=0"), (200, "hits=0, misses=1")
        assert await embed(a) == miss
        await r.until_written()
        assert await embed(a) == hit
        assert await embed(b) == miss
        await r.until_written()
        (worker,) = r.workers
        worker.asked.clear()
        worker.hold = asyncio.Event()
        both = [asyncio.create_task(embed(key, "another")) for key in (a, b)]
        await until(lambda: len(worker.asked) == 2)
        worker.hold.set()
        assert await asyncio.gather(*both) == [miss, miss]
