"""Messages to every subject of the bus: noise, trees, typed ones with a fault, typed ones that mean no good."""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Collection
from contextlib import asynccontextmanager
from pathlib import Path
from random import Random
from typing import Any

import aiohttp

from loadtest.fuzz.noise import Messages, blob, damaged, leaf, message_type, spoiled, text, tree
from loadtest.fuzz.packing import pack
from loadtest.fuzz.twin import MODEL, twin
from pdbus.bus import headers
from pdbus.bus.bus import Bus
from pdbus.bus.transport import Raw
from pdbus.context import RequestContext
from pdbus.errors import InvalidRequest
from pdbus.subjects import Rpc, StreamRpc, Subject, all_subjects

ANSWER_S = 20.0
"""An answer, a refusal or the handler's end by the message's deadline: far more than each may take."""
_SERVICES_API = ("$SRV.PING", "$SRV.INFO", "$SRV.STATS", "$SRV.INFO.router", "$SRV.STATS.router.x")
_FOREIGN_REPLIES = ("pd.v1.cancel", "pd.v1.tokens.router-1", "_INBOX.nobody.1", "$JS.API.INFO", "x")
_OTHER = "some-other-model"
SAFE = {"CHANGELOG", "CHECKPOINTS", "BRANCH", "INVALIDATED", "DELETES", "PRESENCE", "ROWS"}
"""What is written there in good form is done: only services may write it (nats_accounts.py). Good form goes to another
model's; this one's gets what can't be read."""

_ROUTERS = {"INFER", "EMBED", "FEATURES", "REF_STATS", "TOKENS", "CANCEL", "KVINDEX", "TRANSFER", "CREDIT"}
"""What a router serves or hears."""


class Subjects:
    width = 16

    def __init__(
        self, bus: Bus, known: dict[str, str], root: bytes, ask: Callable[[], Awaitable[None]], names: Collection[str]
    ) -> None:
        """`known`: a live value of each subject token; `ask`: one good request, and that all is idle; `names`: of the
        subjects that are meant."""
        self._bus = bus
        self._known = known
        self._ask = ask
        self._subjects = [(name, subject) for name, subject in all_subjects().items() if name in names]
        texts = [*known.values(), MODEL, f"{MODEL}@stable", "stable", root.hex(), "decode-1", "prefill-1", "router-1"]
        self._messages = Messages({str: texts, bytes: [root, bytes(32), root[:8]], int: [1, 2, 16, self._soon]})
        self._strange = Messages({})
        self._inbox = f"{bus.transport.inbox_prefix}.fuzz.{bus.incarnation}"
        self._waiting: dict[str, asyncio.Future[Raw]] = {}
        self._numbers = itertools.count()

    @property
    def _soon(self) -> int:
        return time.time_ns() + 2_000_000_000

    async def start(self) -> None:
        await self._bus.transport.subscribe(f"{self._inbox}.*", self._on_reply)

    async def one(self, rng: Random) -> bool:
        name, subject = rng.choice(self._subjects)
        payload, address = self._payload(rng, name, subject)
        known = rng.random() < 0.9
        tokens = {token: self._known[token] if known else text(rng) or "x" for token in subject.wanted}
        if subject.wanted & {"worker", "address"}:
            tokens |= {key: self._worker(name) for key in subject.wanted & {"worker"}}
        at = address or subject.name(**tokens)
        if rng.random() < 0.02:
            at = rng.choice(_SERVICES_API)
        answers = isinstance(subject, Rpc | StreamRpc) and known and rng.random() < 0.7
        return await self._send(rng, at, payload, answers=answers)

    async def ends(self) -> None:
        await self._bus.transport.barrier()
        await self._ask()

    def _worker(self, name: str) -> str:
        return self._known["prefill" if name.startswith("PREFILL") else "decode"]

    def _payload(self, rng: Random, name: str, subject: Subject) -> tuple[bytes, str | None]:
        """A message, and where it goes, if not to the subject with live tokens."""
        message = message_type(subject)
        kind = rng.random()
        if message is None or kind < 0.15:
            return blob(rng, 2000), None
        if kind < 0.25:
            return pack(tree(rng)), None
        whole = self._typed(rng, message)
        if kind < 0.5:
            return pack(spoiled(rng, whole, leaf)) if name not in SAFE else damaged(rng, b"\xc1" + pack(whole)), None
        if kind < 0.6 and name not in SAFE:
            return damaged(rng, pack(whole)), None
        if name not in SAFE:
            return pack(whole), None
        other = {part: _OTHER if part == "model" else text(rng) or "x" for part in subject.wanted}
        whole = {key: _OTHER if key == "model" else value for key, value in self._strange.of(rng, message).items()}
        return pack(whole), subject.name(**other)

    def _typed(self, rng: Random, message: type[Any]) -> Any:
        whole = self._messages.of(rng, message)
        _soonest(whole, self._soon)
        return whole

    async def _send(self, rng: Random, at: str, payload: bytes, *, answers: bool) -> bool:
        sent, replies = _headers(rng), None
        transport = self._bus.transport
        if not answers:
            reply = rng.choice((*_FOREIGN_REPLIES, "", "", ""))
            _try(lambda: transport.send(at, payload, reply=reply, headers=sent))
            await transport.writable()
            return False
        subject = f"{self._inbox}.{next(self._numbers)}"
        replies = self._waiting[subject] = asyncio.get_running_loop().create_future()
        try:
            if not _try(lambda: transport.send(at, payload, reply=subject, headers=sent)):
                return False
            async with asyncio.timeout(ANSWER_S):
                raw = await replies
        finally:
            del self._waiting[subject]
        failed = headers.ERROR in raw.headers
        if failed:
            told = headers.error_of(raw, at)
            assert getattr(told, "code", "internal") != "internal", f"{told} to {payload[:500]!r} at {at}"
        return not failed and "status" not in raw.headers

    def _on_reply(self, raw: Raw) -> None:
        waiting = self._waiting.get(raw.subject)
        if waiting is None:
            if raw.reply:
                self._bus.transport.send(raw.reply, headers=headers.CALLER_GONE)  # of a stream that nobody reads
        elif not waiting.done():
            waiting.set_result(raw)


def _headers(rng: Random) -> dict[str, str]:
    """Of a request, right or wrong. None where they can't be sent at all."""
    ctx = RequestContext.after(rng.choice((0.05, 1.0, 2.0)))
    sent = headers.request_headers(ctx) if rng.random() < 0.7 else {}
    if rng.random() < 0.4:
        name = rng.choice((headers.DEADLINE, headers.BUDGET, headers.REQUEST_ID, headers.TENANT, headers.API_KEY,
                           headers.ERROR, headers.SEQUENCE, headers.END, "traceparent", "baggage"))  # fmt: skip
        value = rng.choice(
            (text(rng), "9" * 25, "-1", "1e400", "nan", "0", str(time.time_ns()), "00-" + "a" * 52, "%ff%00")
        )
        sent[name] = value.replace("\r", "").replace("\n", "").replace("\0", "")
    return sent


def _try(send: Callable[[], None]) -> bool:
    """Whether it was sent: a caller's own library refuses what has no form on the wire."""
    try:
        send()
    except (InvalidRequest, UnicodeError, ValueError):
        return False
    return True


def _soonest(whole: Any, soon_ns: int) -> None:
    """Deadlines of tickets end soon: else what is accepted would be held until long after the last input."""
    if isinstance(whole, dict):
        if "deadline_ns" in whole:
            whole["deadline_ns"] = soon_ns
        for inner in whole.values():
            _soonest(inner, soon_ns)


@asynccontextmanager
async def subjects(folder: Path) -> AsyncIterator[Subjects]:
    """All services on a real server."""
    # Only here: the engines bring torch, which no other kind needs.
    from loadtest.fuzz.house import house

    async with house(folder) as made:
        cards = made.cards
        router = cards["router"]

        async def ask() -> None:
            made.check()
            await made.until_idle()
            await complete(router.url)

        known = {service: card.id for service, card in cards.items()} | {"address": cards["decode"].bulk}
        fuzzer = Subjects(made.bus, _known(known), cards["decode"].roots[0], ask, all_subjects())
        await fuzzer.start()
        yield fuzzer


@asynccontextmanager
async def twin_subjects(_: Path) -> AsyncIterator[Subjects]:
    """A router with simulated workers, on the in-memory broker."""
    async with twin() as made:

        async def ask() -> None:
            await made.until_idle()
            await complete(made.router.http.url)

        known = {"router": "router-0", "decode": "decode-0", "prefill": "prefill-0", "address": made.bus.bulk.address}
        fuzzer = Subjects(made.bus, _known(known), made.root, ask, _ROUTERS)
        await fuzzer.start()
        yield fuzzer


def _known(live: dict[str, str]) -> dict[str, str]:
    """A value for each token that a subject may have."""
    other = {"model": MODEL, "server": live.get("param_server", "nobody"), "node": live.get("cache", "nobody")}
    rest = {"shard": "0", "tx": "tx", "table": "table", "branch": "branch", "service": "prefill", "id": "nobody"}
    stream = {
        "session": "0-0",
        "attempt": "1",
        "stream": "1",
        "subject": "somebodys-features",
        "worker": live["decode"],
    }
    return {**live, **other, **rest, **stream}


async def complete(url: str) -> None:
    body = {"model": MODEL, "prompt": "Are you still there?", "max_tokens": 4, "ignore_eos": True}
    async with aiohttp.ClientSession() as http, http.post(f"{url}/v1/completions", json=body) as answer:
        assert answer.status == 200, await answer.text()
        assert (await answer.json())["usage"]["completion_tokens"] > 0
