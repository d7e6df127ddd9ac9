"""One request as a careful client makes it: asked again, under one idempotency key, until it is answered or its time is
up; elsewhere where its router is gone. By HTTP of whichever router, or over the bus by the Python client."""

from __future__ import annotations

import asyncio
import json
import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import aiohttp

from loadtest.chaos.questions import Ids, Question
from pdbus.backoff import backoff_s
from pdbus.client import Client
from pdbus.errors import DeadlineExceeded, PdbusError

DEADLINE_S = 60.0
_SILENCE_S = 8.0
"""Without a token or an end: the client takes its router for dead. Whole answers tell nothing until they are there."""
_WHOLE_S = 25.0
_CLEAR = ("overloaded", "unavailable", "root_gone", "corrupt", "deadline_exceeded")


class Again(Exception):
    """Worth another try; the message says why. `clear`: the service said so itself."""

    def __init__(self, reason: str, after_s: float = 0.0, *, clear: bool = False) -> None:
        super().__init__(reason)
        self.after_s, self.clear = after_s, clear


class Failed(Exception):
    """Not worth another try."""


@dataclass
class Told:
    """What a client was told. Times are monotonic seconds."""

    question: int
    way: str
    sent_s: float
    end_s: float = 0.0
    tries: int = 0
    parts: list[list[int]] = field(default_factory=list)
    """Token ids of each choice, each once for the one who reads them."""
    tokens_s: list[float] = field(default_factory=list)
    """When new tokens came."""
    refused: str = ""
    failed: str = ""
    broken_s: list[float] = field(default_factory=list)
    """When a stream by HTTP that had begun broke off."""

    @property
    def ids(self) -> Ids:
        return tuple(map(tuple, self.parts))

    @property
    def done(self) -> bool:
        return bool(self.end_s) and not self.refused and not self.failed


@dataclass
class HttpCaller:
    """`urls`: of the routers, as they are known now."""

    http: aiohttp.ClientSession
    model: str
    urls: Callable[[], Sequence[str]]
    rng: random.Random

    async def ask(self, question: Question, told: Told, *, stream: bool, store: bool = False) -> None:
        key, until_s, avoid, retries = f"{self.rng.getrandbits(64):x}", told.sent_s + DEADLINE_S, "", 0
        while True:
            url, began_s = self._router(avoid), time.monotonic()
            told.tries += 1
            try:
                await self._try(url, question, told, key, until_s, stream=stream, store=store)
                return
            except Again as reason:
                if told.tokens_s and told.tokens_s[-1] > began_s:
                    told.broken_s.append(time.monotonic())
                retries, avoid, why, clear = retries + 1, url, f"{reason}", reason.clear
                wait_s = max(backoff_s(retries, self.rng), reason.after_s * self.rng.uniform(0.5, 1.0))
            except Failed as reason:
                told.failed = f"{reason}"
                return
            if time.monotonic() + wait_s >= until_s:
                told.refused, told.failed = (why, "") if clear else ("", why)
                return
            await asyncio.sleep(wait_s)

    def _router(self, avoid: str) -> str:
        known = self.urls()
        return self.rng.choice([url for url in known if url != avoid] or list(known))

    async def _try(
        self, url: str, question: Question, told: Told, key: str, until_s: float, *, stream: bool, store: bool
    ) -> None:
        left_s = max(until_s - time.monotonic(), 0.05)
        headers = {"Idempotency-Key": key, "X-Request-Timeout-Ms": str(int(left_s * 1e3))}
        if not store:
            headers["Cache-Control"] = "no-store"
        body = {**question.body, "model": self.model, "stream": stream}
        within = aiohttp.ClientTimeout(left_s + 2.0, sock_connect=2.0, sock_read=_SILENCE_S if stream else _WHOLE_S)
        try:
            async with self.http.post(url + question.path, json=body, headers=headers, timeout=within) as reply:
                if reply.status != 200:
                    raise _refusal(await reply.read(), reply.headers)
                if stream:
                    await _read_events(reply, told, question.choices)
                else:
                    answer = await reply.json()
                    told.parts = [choice["token_ids"] for choice in answer["choices"]]
        except (aiohttp.ClientError, TimeoutError, OSError, ValueError) as error:
            raise Again(f"{type(error).__name__}: {error}") from None


def _refusal(body: bytes, headers: Any) -> Exception:
    try:
        error = json.loads(body)["error"]
    except (ValueError, KeyError, TypeError):
        return Failed(f"an answer that is no error either: {body[:80]!r}")
    if error.get("code") in _CLEAR:
        return Again(f"{error['code']}: {error['message']}", float(headers.get("Retry-After", 0)), clear=True)
    return Failed(f"{error.get('code')}: {error.get('message')}")


async def _read_events(reply: aiohttp.ClientResponse, told: Told, choices: int) -> None:
    """Takes what is new: a repeated stream begins at the first token again. What is told twice has to be the same."""
    told.parts = told.parts or [[] for _ in range(choices)]
    at, ended = [0] * choices, set()
    async for line in reply.content:
        if not line.startswith(b"data:") or line[5:].strip() == b"[DONE]":
            continue
        event = json.loads(line[5:])
        if "error" in event:
            raise _refusal(line[5:], {})
        for choice in event["choices"]:
            number, ids = choice["index"], choice.get("token_ids") or []
            known = told.parts[number][at[number] : at[number] + len(ids)]
            if known != ids[: len(known)]:
                raise Failed(f"a repeated stream says {ids[: len(known)]} where the first said {known}")
            at[number] += len(ids)
            if new := ids[len(known) :]:
                told.parts[number] += new
                told.tokens_s.append(time.monotonic())
            if choice.get("finish_reason"):
                ended.add(number)
    if len(ended) < choices:
        raise Again("the stream ended in its middle")


async def ask_native(client: Client, question: Question, told: Told, unique: str, *, stream: bool) -> None:
    """By the Python client, which does all of that itself. `unique`: makes it a request that no cache has."""
    fields = {**question.body, "stop": [unique], "timeout_s": DEADLINE_S}
    told.tries = 1
    try:
        if not stream:
            ask = client.chat if question.endpoint == "chat.completions" else client.complete
            answer = await ask(fields.pop("messages", None) or fields.pop("prompt"), **fields)
            told.parts = [list(choice["token_ids"]) for choice in answer["choices"]]
            return
        begin = client.chat_stream if question.endpoint == "chat.completions" else client.complete_stream
        told.parts = [[] for _ in range(question.choices)]
        async with begin(fields.pop("messages", None) or fields.pop("prompt"), **fields) as chunks:
            async for chunk in chunks:
                for choice in chunk["choices"]:
                    if ids := choice.get("token_ids"):
                        told.parts[choice["index"]] += ids
                        told.tokens_s.append(time.monotonic())
    except PdbusError as error:
        why = f"{error.code}: {error.message}"
        if error.retryable or isinstance(error, DeadlineExceeded):
            told.refused = why
        else:
            told.failed = why
