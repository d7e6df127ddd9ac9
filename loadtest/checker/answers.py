"""Answers of the watermark model, asked for in an open loop, and what they tell of themselves."""

from __future__ import annotations

import asyncio
import json
import random
import time
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import aiohttp

from loadtest.checker import watermark
from loadtest.checker.watermark import FURTHEST, LAYERS, Marks

TOKENS = 2 * LAYERS
_TIMEOUT_S = 20.0
_STREAMED = 0.3
_BY_CANARY, _BY_ROOT, _FRESH = 0.1, 0.1, 0.3
_PREFIXES, _ENDS = 6, 8
_RETRYABLE = ("overloaded", "unavailable", "root_gone", "deadline_exceeded", "corrupt")
_NAMED_GONE = "model_not_found"
"""For a root that is forgotten meanwhile, or a canary that has ended."""


@dataclass
class Answer:
    """`root`: in hex, as the answer names it; `ids`: its tokens. Times are monotonic seconds."""

    prompt: tuple[int, ...]
    asked: str
    due_s: float
    sent_s: float = 0.0
    end_s: float = 0.0
    root: str = ""
    ids: list[int] = field(default_factory=list)
    cached: int = 0
    refused: str = ""
    """The code of a refusal that a client can act on."""
    failed: str = ""
    """Any other end than an answer or a refusal."""


class Wrong(Exception):
    """A body that no client could read."""


@dataclass
class Answers:
    """Asks until it is cancelled. Half of the prompts are asked again and again, all share a few beginnings."""

    url: str
    model: str
    rng: random.Random
    roots: list[str] = field(default_factory=list)
    """Roots, in hex, that may be asked for by name; kept up by the caller."""
    all: list[Answer] = field(default_factory=list)
    open: int = 0

    async def run(self, rate: float, most: int) -> None:
        """`rate` a second in the mean, until `most` were asked for."""
        connector = aiohttp.TCPConnector(limit=0)
        async with aiohttp.ClientSession(connector=connector) as http, asyncio.TaskGroup() as asking:
            due_s = time.monotonic()
            while len(self.all) < most:
                due_s += self.rng.expovariate(rate)
                await asyncio.sleep(max(0.0, due_s - time.monotonic()))
                answer = Answer(self._prompt(), self._name(), due_s)
                self.all.append(answer)
                asking.create_task(self.ask(http, answer, streamed=self.rng.random() < _STREAMED))

    async def one(self) -> Answer:
        """An answer by the default ref, besides the others."""
        answer = Answer(self._prompt(), self.model, time.monotonic())
        self.all.append(answer)
        async with aiohttp.ClientSession() as http:
            await self.ask(http, answer, streamed=False)
        return answer

    async def ask(self, http: aiohttp.ClientSession, answer: Answer, *, streamed: bool) -> None:
        body = {
            "model": answer.asked,
            "prompt": list(answer.prompt),
            "max_tokens": TOKENS,
            "temperature": 0,
            "ignore_eos": True,
            "stream": streamed,
            "user": str(answer.prompt[0]),
            "timeout": _TIMEOUT_S,
        }
        self.open += 1
        answer.sent_s = time.monotonic()
        try:
            async with http.post(
                f"{self.url}/v1/completions", json=body, timeout=aiohttp.ClientTimeout(_TIMEOUT_S + 10.0)
            ) as reply:
                if reply.status != 200:
                    _refuse(answer, (await reply.json())["error"])
                elif streamed:
                    await _read_events(answer, reply)
                else:
                    _read(answer, await reply.json())
        except (aiohttp.ClientError, TimeoutError, ValueError, KeyError, Wrong) as error:
            answer.failed = f"{type(error).__name__}: {error}"
        finally:
            answer.end_s = time.monotonic()
            self.open -= 1

    def _prompt(self) -> tuple[int, ...]:
        """At most FURTHEST tokens with the answer."""
        fresh = self.rng.random() < _FRESH
        begins = random.Random(self.rng.randrange(_PREFIXES)).choices(range(256), k=34)
        end = [self.rng.randrange(256) for _ in range(4)] if fresh else [1, 2, 3, self.rng.randrange(_ENDS)]
        assert len(begins) + len(end) + TOKENS <= FURTHEST
        return (*begins, *end)

    def _name(self) -> str:
        drawn = self.rng.random()
        if drawn < _BY_CANARY:
            return f"{self.model}@canary"
        if drawn < _BY_CANARY + _BY_ROOT and self.roots:
            return f"{self.model}@{self.rng.choice(self.roots)[:16]}"
        return self.model


def _refuse(answer: Answer, error: Mapping[str, Any]) -> None:
    code = str(error.get("code"))
    if code in _RETRYABLE or (code == _NAMED_GONE and "@" in answer.asked):
        answer.refused = code
    else:
        answer.failed = f"{code}: {error.get('message')}"


def _read(answer: Answer, body: Mapping[str, Any]) -> None:
    choice = body["choices"][0]
    if choice["finish_reason"] != "length":
        raise Wrong(f"it ended by {choice['finish_reason']}")
    answer.root = body["system_fingerprint"].removeprefix("root-")
    answer.cached = body["usage"]["prompt_tokens_details"]["cached_tokens"]
    answer.ids = [int(word) for word in choice["text"].split()]


async def _read_events(answer: Answer, reply: aiohttp.ClientResponse) -> None:
    text, finish = "", None
    async for line in reply.content:
        if not line.startswith(b"data:") or line[5:].strip() == b"[DONE]":
            continue
        event = json.loads(line[5:])
        if "error" in event:
            _refuse(answer, event["error"])
            return
        root = event["system_fingerprint"].removeprefix("root-")
        if answer.root and root != answer.root:
            raise Wrong("it names two roots")
        answer.root = root
        for choice in event["choices"]:
            text += choice["text"]
            finish = choice["finish_reason"] or finish
    if finish != "length":
        raise Wrong(f"the stream ended by {finish}")
    answer.ids = [int(word) for word in text.split()]


@dataclass
class Judgement:
    """How many answers there were of each kind, and what is wrong with those that are wrong."""

    right: int = 0
    refused: Counter[str] = field(default_factory=Counter)
    failed: Counter[str] = field(default_factory=Counter)
    wrong: list[str] = field(default_factory=list)
    """Tokens that no version would answer to that prompt; or a root that is unknown."""
    mixed: list[str] = field(default_factory=list)
    """Tokens of other versions than the one that the answer names."""
    cached: int = 0
    """Right answers that used cached KV or were cached themselves."""
    roots: int = 0
    """Different ones that answered."""


def judge(answers: list[Answer], versions: Mapping[str, Marks]) -> Judgement:
    """`versions`: by root in hex, every version that there was."""
    found, roots = Judgement(), set()
    known = {number for marks in versions.values() for number in (marks.embedding, marks.head, *marks.mlp)}
    for answer in answers:
        if answer.refused:
            found.refused[answer.refused] += 1
        elif answer.failed:
            found.failed[answer.failed[:120]] += 1
        elif (marks := versions.get(answer.root)) is None:
            found.wrong.append(f"root {answer.root[:12]} was never committed")
        elif answer.ids == watermark.answer(marks, answer.prompt, TOKENS):
            found.right += 1
            found.cached += answer.cached > 0
            roots.add(answer.root)
        else:
            what = watermark.explain(answer.prompt, answer.ids, marks, sorted(known))
            told = f"{answer.asked} by {answer.root[:12]}, {answer.cached} cached: {what or 'too short'}"
            alike = len(answer.ids) == TOKENS and watermark.follows(answer.prompt, answer.ids)
            (found.mixed if alike else found.wrong).append(told)
    found.roots = len(roots)
    return found
