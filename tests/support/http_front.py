"""Requests to a router's HTTP front, as they are and as they should not be."""

from __future__ import annotations

import json
from typing import Any

import aiohttp

from tests.support.router_rig import MODEL, Rig

BODY: dict[str, Any] = {"model": MODEL, "prompt": "hi", "max_tokens": 8, "temperature": 0}
CHAT: dict[str, Any] = {"model": MODEL, "messages": [{"role": "user", "content": "hi"}], "max_tokens": 8}


async def post(
    http: aiohttp.ClientSession, r: Rig, body: Any = BODY, path: str = "/v1/completions", **headers: str
) -> tuple[int, dict[str, Any], Any]:
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    sent = {name.replace("_", "-"): value for name, value in headers.items()}
    async with http.post(r.url + path, data=data, headers={"Content-Type": "application/json"} | sent) as response:
        return response.status, await response.json(), response.headers
