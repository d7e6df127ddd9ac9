"""One request as a careful client makes it: asked again, under one idempotency key, until it is answered or its time is
up; elsewhere where its router is gone. By HTTP of whichever router, or over the bus by the Python client."""

from __future__ import annotations

import asyncio
import json
import random
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import aiohttp

from loadtest.chaos.questions import Ids, Question
from pdbus.backoff import backoff_s
from pdbus.client import Client
from pdbus.errors import DeadlineExceeded, PdbusError

DEADLINE_S = 60.0
LEAST_PAUSE_S = 0.05
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
    texts: list[str] = field(default_factory=list)
    """Of each choice: as the last try told it."""
    last_s: float = 0.0
    """When a new token came last; 0: none did, one by one."""
    pauses: list[tuple[float, float]] = field(default_factory=list)
    """Between the asking and new tokens, those that are long enough to be looked at."""
    refused: str = ""
    failed: str = ""
    broken_s: list[float] = field(default_factory=list)
    """When a stream by HTTP that had begun broke off."""

    @property
    def ids(self) -> Ids:
        return tuple(map(tuple, self.parts))

    def came(self, now_s: float) -> None:
        """A new token."""
        before_s, self.last_s = self.last_s or self.sent_s, now_s
        if now_s - before_s >= LEAST_PAUSE_S:
            self.pauses.append((before_s, now_s))

    def begin(self, choices: int) -> None:
        """Another try. A repeated answer begins at the first token again, and repeats what was told."""
        self.tries += 1
        self.parts = self.parts or [[] for _ in range(choices)]
        self.texts = [""] * choices

    def whole(self, answer: Mapping[str, Any]) -> None:
        choices = answer["choices"]
        self.parts = [list(choice["token_ids"]) for choice in choices]
        self.texts = [choice["message"]["content"] if "message" in choice else choice["text"] for choice in choices]

    def chunk(self, choice: Mapping[str, Any]) -> None:
        """Of a stream: its text, to which more is added."""
        delta = choice.get("delta")
        self.texts[choice["index"]] += (choice.get("text") if delta is None else delta.get("content")) or ""


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
            url, began_s = self.router(avoid), time.monotonic()
            told.begin(question.choices)
            try:
                await self._try(url, question, told, key, until_s, stream=stream, store=store)
                return
            except Again as reason:
                if told.last_s > began_s:
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

    def router(self, avoid: str) -> str:
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
                    raise refusal(await reply.read(), reply.headers)
                if stream:
                    await _read_events(reply, told, question.choices)
                else:
                    told.whole(await reply.json())
        except (aiohttp.ClientError, TimeoutError, OSError, ValueError) as error:
            raise Again(f"{type(error).__name__}: {error}") from None


def refusal(body: bytes, headers: Any) -> Exception:
    """What an answer other than 200 says."""
    try:
        error = json.loads(body)["error"]
    except (ValueError, KeyError, TypeError):
        return Failed(f"an answer that is no error either: {body[:80]!r}")
    if error.get("code") in _CLEAR:
        return Again(f"{error['code']}: {error['message']}", float(headers.get("Retry-After", 0)), clear=True)
    return Failed(f"{error.get('code')}: {error.get('message')}")


async def _read_events(reply: aiohttp.ClientResponse, told: Told, choices: int) -> None:
    """Takes what is new. What is told twice has to be the same."""
    at, ended = [0] * choices, set()
    async for line in reply.content:
        if not line.startswith(b"data:") or line[5:].strip() == b"[DONE]":
            continue
        event = json.loads(line[5:])
        if "error" in event:
            raise refusal(line[5:], {})
        for choice in event["choices"]:
            number, ids = choice["index"], choice.get("token_ids") or []
            known = told.parts[number][at[number] : at[number] + len(ids)]
            if known != ids[: len(known)]:
                raise Failed(f"a repeated stream says {ids[: len(known)]} where the first said {known}")
            at[number] += len(ids)
            if new := ids[len(known) :]:
                told.parts[number] += new
                told.came(time.monotonic())
            told.chunk(choice)
            if choice.get("finish_reason"):
                ended.add(number)
    if len(ended) < choices:
        raise Again("the stream ended in its middle")


async def ask_native(client: Client, question: Question, told: Told, unique: str, *, stream: bool) -> None:
    """By the Python client, which does all of that itself. `unique`: makes it a request that no cache has."""
    fields = {**question.body, "stop": [unique], "timeout_s": DEADLINE_S}
    told.begin(question.choices)
    try:
        if not stream:
            ask = client.chat if question.endpoint == "chat.completions" else client.complete
            told.whole(await ask(fields.pop("messages", None) or fields.pop("prompt"), **fields))
            return
        begin = client.chat_stream if question.endpoint == "chat.completions" else client.complete_stream
        async with begin(fields.pop("messages", None) or fields.pop("prompt"), **fields) as chunks:
            async for chunk in chunks:
                for choice in chunk["choices"]:
                    told.chunk(choice)
                    if ids := choice.get("token_ids"):
                        told.parts[choice["index"]] += ids
                        told.came(time.monotonic())
    except PdbusError as error:
        why = f"{error.code}: {error.message}"
        if error.retryable or isinstance(error, DeadlineExceeded):
            told.refused = why
        else:
            told.failed = why
