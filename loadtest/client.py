"""One streamed request to an OpenAI-compatible server, and what was observed of it."""

from __future__ import annotations

import asyncio
import itertools
import json
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import aiohttp

from pdbus.context import LONGEST_DEADLINE_S


@dataclass
class Observation:
    """Moments are seconds from the run's start. An answer counts as complete only with a finish reason and `[DONE]`."""

    due_s: float
    """When the request should have left; latencies count from here, so that a late generator hides nothing."""
    sent_s: float = 0.0
    chunks_s: list[float] = field(default_factory=list)
    """When each chunk with text arrived."""
    end_s: float = 0.0
    prompt_tokens: int = 0
    output_tokens: int = 0
    cached_tokens: int = 0
    status: int = 0
    finish: str | None = None
    error: str | None = None
    text: str = ""
    ids: list[int] = field(default_factory=list)
    """Of the text's tokens, where `return_token_ids` was asked for."""
    fingerprint: str = ""
    """Of the version that answered, in servers that tell it. Two in one answer are an error."""

    @property
    def ok(self) -> bool:
        return self.error is None

    @property
    def ttft_s(self) -> float | None:
        return self.chunks_s[0] - self.due_s if self.chunks_s else None

    @property
    def gaps_s(self) -> list[float]:
        """Inter-token latencies as the client sees them, chunk to chunk."""
        return [later - earlier for earlier, later in itertools.pairwise(self.chunks_s)]


def with_key(api_key: str | None) -> dict[str, str]:
    """The headers of who asks with that key."""
    return {} if api_key is None else {"authorization": f"Bearer {api_key}"}


async def ask(
    session: aiohttp.ClientSession,
    url: str,
    body: dict[str, Any],
    due_s: float,
    start: float,
    timeout_s: float,
    seen: Observation | None = None,
) -> Observation:
    """Sends `body` as a streamed completion: of a chat where it has messages, of a prompt otherwise. Fills `seen`, for
    who wants to look meanwhile, or a new one.

    Never raises for what the server or the network does wrong."""
    seen = seen or Observation(due_s)
    seen.sent_s = time.perf_counter() - start
    payload = body | {"stream": True, "stream_options": {"include_usage": True}}
    path = "/v1/chat/completions" if "messages" in body else "/v1/completions"
    try:
        async with asyncio.timeout(timeout_s), session.post(url + path, json=payload) as response:
            seen.status = response.status
            if response.status != 200:
                seen.error = _reason(response.status, await response.text())
            else:
                await _read(response, seen, start)
    except TimeoutError:
        seen.error = f"no end within {timeout_s:g} s"
    except (aiohttp.ClientError, OSError, ValueError) as error:
        seen.error = f"{type(error).__name__}: {error}"
    seen.end_s = time.perf_counter() - start
    return seen


async def _read(response: aiohttp.ClientResponse, seen: Observation, start: float) -> None:
    done = False
    async for line in response.content:
        if not line.startswith(b"data:"):
            continue
        data = line[5:].strip()
        if data == b"[DONE]":
            done = True
            break
        _take(json.loads(data), seen, time.perf_counter() - start)
    if seen.error is None and not (done and seen.finish):
        seen.error = "the stream ended without a finish reason"


def _take(chunk: dict[str, Any], seen: Observation, now_s: float) -> None:
    if error := chunk.get("error"):
        seen.error = str(error.get("message", error))
        return
    if fingerprint := chunk.get("system_fingerprint"):
        if seen.fingerprint not in ("", fingerprint):
            seen.error = f"one answer of two versions, {seen.fingerprint} and {fingerprint}"
        seen.fingerprint = fingerprint
    for choice in chunk.get("choices", ()):
        seen.ids += choice.get("token_ids") or []
        if text := choice.get("text") or choice.get("delta", {}).get("content"):
            seen.chunks_s.append(now_s)
            seen.text += text
        seen.finish = choice.get("finish_reason") or seen.finish
    if usage := chunk.get("usage"):
        seen.prompt_tokens = usage.get("prompt_tokens", 0)
        seen.output_tokens = usage.get("completion_tokens", 0)
        seen.cached_tokens = (usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0


def _reason(status: int, text: str) -> str:
    try:
        return f"{status}: {json.loads(text)['error']['message']}"
    except (ValueError, KeyError, TypeError):
        return f"{status}: {text[:200]}"


@asynccontextmanager
async def session() -> AsyncIterator[aiohttp.ClientSession]:
    """Connections as many as there are requests, no answer from the result cache, and none kept there; the server's own
    deadline is as late as it can be, since what asks has one."""
    connector, timeout = aiohttp.TCPConnector(limit=0), aiohttp.ClientTimeout(total=None)
    headers = {"Cache-Control": "no-store", "X-Request-Timeout-Ms": str(int(LONGEST_DEADLINE_S * 1e3))}
    async with aiohttp.ClientSession(connector=connector, timeout=timeout, headers=headers) as opened:
        yield opened
