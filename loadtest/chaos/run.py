"""The stack, its load and its strikes, and what was found."""

from __future__ import annotations

import asyncio
import random
import subprocess
import tempfile
import time
from collections import defaultdict
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

import aiohttp

from loadtest.chaos.asking import DEADLINE_S, HttpCaller, Told, ask_native
from loadtest.chaos.jobs import ask_job
from loadtest.chaos.judging import Judged
from loadtest.chaos.leaks import at_rest, grown
from loadtest.chaos.nats import cut_nats
from loadtest.chaos.questions import Question, Right, questions
from loadtest.chaos.strikes import Strike, Strikes
from loadtest.chaos.telling import Telling, named
from loadtest.stack import Stack, stack_in
from loadtest.tiny import tiny_checkpoint
from pdbus.bus.bus import Bus, connect
from pdbus.bus.presence import Fleet
from pdbus.client import Client
from pdbus.messages.debug import Holdings
from pdbus.tasks import cancelled

MODEL = "chaos"
_CONTEXT_TOKENS = 2048
_COUNTS = tuple(
    word
    for kind in ("routers", "prefill", "decode", "param-servers", "cache-nodes", "invalidators")
    for word in (f"--{kind}", "2")
)
_ENV = {"PDBUS_KV_BYTES": str(1 << 20), "PDBUS_CACHE_BYTES": str(64 << 20), "PDBUS_DRAIN_S": "20"}
"""A pool that a few long answers fill: it has to run out now and then. Time enough, on a busy machine too, for what
runs to end where it began when its process is told to."""
_QUESTIONS = 24
_JOBS, _NATIVE, _STREAMED = 0.04, 0.35, 0.75
_STORED = 0.25
"""Of those by HTTP: they may be answered by the result cache, and go there."""
_AT_ONCE = 4
_LATE_S = 2 * DEADLINE_S + 180.0
"""Past its time: for the last requests and the last strike's victim. Whatever lasts longer hangs."""
_SURPRISED_S = 1.0
_IDLE_S = 60.0
"""Longer than what waits for an acknowledgement that never comes is kept."""


@dataclass(frozen=True)
class Wanted:
    minutes: float = 30.0
    every_s: float = 30.0
    callers: int = 8
    seed: int = 0
    keep: Path | None = None
    """A folder to leave logs in."""


@dataclass
class Found:
    seconds: float
    judged: list[Judged]
    strikes: list[Strike]
    held: dict[str, dict[str, int]]
    """In the end, by process: what it holds although nothing is asked of it."""
    grown: list[str]
    silent: list[str]
    """Processes that tell nothing in the end."""
    exits: list[str]
    """Processes that ended unasked."""
    troubles: list[str]
    """Of the test itself: it goes on to its end, but can't be trusted to have seen everything."""


@dataclass
class World:
    stack: Stack
    bus: Bus
    fleet: Fleet
    proxy: subprocess.Popen[str]
    nats: list[int]
    """Process ids of the NATS server, the present one last."""
    caller: HttpCaller
    client: Client
    rng: random.Random
    lives: defaultdict[str, set[str]] = field(default_factory=lambda: defaultdict(set))
    """Incarnations by id."""

    def __post_init__(self) -> None:
        self.fleet.on_change(self._note)
        self._note()

    def _note(self) -> None:
        for card in self.fleet.cards():
            self.lives[card.id].add(card.incarnation)


def _stack(folder: Path, nats_url: str) -> AbstractAsyncContextManager[Stack]:
    checkpoint = tiny_checkpoint(folder / "checkpoint", _CONTEXT_TOKENS)
    options = ("--model", str(checkpoint), "--name", MODEL, *_COUNTS)
    return stack_in(folder / "data", *options, env={**_ENV, "NATS_URL": nats_url})


@asynccontextmanager
async def world(folder: Path, rng: random.Random) -> AsyncIterator[World]:
    """Raises Refused where no stack comes up."""
    pids: list[int] = []
    async with AsyncExitStack() as life:
        nats = await life.enter_async_context(cut_nats(folder / "nats", pids.append))
        stack = await life.enter_async_context(_stack(folder, nats.cut_url))
        bus = await life.enter_async_context(connect(nats.url, name="loadtest chaos"))
        fleet = await life.enter_async_context(Fleet(bus))
        client = Client(bus, MODEL)
        life.push_async_callback(client.weights.close)
        http = await life.enter_async_context(aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)))
        while len(fleet.live("router")) < 2:  # noqa: ASYNC110 - cards come twice a second
            await asyncio.sleep(0.1)

        def urls() -> list[str]:
            return [card.url for card in fleet.cards() if card.service == "router" and card.url]

        yield World(stack, bus, fleet, nats.proxy, pids, HttpCaller(http, MODEL, urls, rng), client, rng)


async def chaos(wanted: Wanted, say: Callable[[str], None] = lambda line: None) -> Found:
    """Raises Refused where no stack comes up, RuntimeError where it can't be trusted undisturbed. Whatever goes wrong
    later is told by what it returns. `say`: hears of each strike once it is over."""
    rng = random.Random(wanted.seed)
    found: Found | None = None
    with tempfile.TemporaryDirectory(prefix="pdbus-chaos-", ignore_cleanup_errors=True) as temporary:
        folder = wanted.keep or Path(temporary)
        folder.mkdir(parents=True, exist_ok=True)
        try:
            async with world(folder, rng) as here:
                found = await _drive(wanted, here, say)
        except Exception as error:
            if found is None:
                raise
            found.troubles.append(f"in the end: {named(error)}")
    return found


async def _drive(wanted: Wanted, here: World, say: Callable[[str], None]) -> Found:
    asked = questions(_QUESTIONS, _CONTEXT_TOKENS, wanted.seed)
    expected = await _expected(here, asked)
    before, _ = await at_rest(here.bus, here.fleet, _IDLE_S)
    strikes = Strikes(here.stack, here.fleet, lambda: here.nats[-1], here.proxy, random.Random(here.rng.random()))
    judged: list[Judged] = []
    troubles: list[str] = []
    began_s = time.monotonic()
    until_s = began_s + 60 * wanted.minutes
    tell = Telling(began_s, judged, strikes, troubles, say)
    callers = [asyncio.create_task(_ask_on(here, asked, expected, judged, until_s)) for _ in range(wanted.callers)]
    striking = asyncio.create_task(_strike_on(strikes, wanted.every_s, until_s, tell))
    try:
        async with asyncio.timeout(60 * wanted.minutes + _LATE_S):
            await asyncio.gather(striking, *callers)
    except Exception as error:
        troubles.append(f"load and strikes did not end as they should: {named(error)}")
    finally:
        await cancelled(striking, *callers)
    seconds = time.monotonic() - began_s
    after: dict[str, Holdings] = {}
    held: dict[str, dict[str, int]] = {}
    try:
        async with asyncio.timeout(2 * _IDLE_S):
            after, held = await at_rest(here.bus, here.fleet, _IDLE_S)
    except Exception as error:
        troubles.append(f"who holds what could not be asked: {named(error)}")
    if (code := here.stack.process.poll()) is not None:
        troubles.append(f"the stack's launcher ended with {code}")
    silent = sorted(here.lives.keys() - after.keys() - held.keys())
    return Found(seconds, judged, strikes.all, held, grown(before, after), silent, _exits(here, strikes), troubles)


async def _expected(here: World, asked: list[Question]) -> dict[int, Right]:
    """Undisturbed, each twice. Raises RuntimeError where that isn't the same."""
    expected: dict[int, Right] = {}
    for stream in (False, True):
        all = [Told(number, "undisturbed", time.monotonic()) for number in range(len(asked))]
        waiting = iter(all)

        async def ask_on(stream: bool = stream, waiting: Iterator[Told] = waiting) -> None:
            for told in waiting:
                told.sent_s = time.monotonic()
                await here.caller.ask(asked[told.question], told, stream=stream)

        await asyncio.gather(*(ask_on() for _ in range(_AT_ONCE)))
        for told in all:
            right = Right(told.ids, tuple(told.texts))
            if told.failed or told.refused or expected.setdefault(told.question, right) != right:
                raise RuntimeError(f"undisturbed, question {told.question}: {told.failed or told.refused or right}")
    return expected


async def _ask_on(
    here: World, asked: list[Question], expected: dict[int, Right], judged: list[Judged], until_s: float
) -> None:
    rng = here.rng
    while time.monotonic() < until_s:
        number, stream, native = rng.randrange(len(asked)), rng.random() < _STREAMED, rng.random() < _NATIVE
        store = not native and rng.random() < _STORED
        way = f"{'bus' if native else 'HTTP'} {'streamed' if stream else 'whole'}{', stored' if store else ''}"
        job = rng.random() < _JOBS
        told = Told(number, "job" if job else way, time.monotonic())
        try:
            async with asyncio.timeout(2 * DEADLINE_S):
                if job:
                    await ask_job(here.caller, asked[number], told)
                elif native:
                    await ask_native(here.client, asked[number], told, f"~{rng.getrandbits(64):x}", stream=stream)
                else:
                    await here.caller.ask(asked[number], told, stream=stream, store=store)
        except Exception as error:  # it hangs, or what came is nothing that a client could make anything of
            told.failed = named(error)
            await asyncio.sleep(_SURPRISED_S)  # or those that fail at once would come without end
        told.end_s = time.monotonic()
        judged.append(Judged.of(told, expected[number]))


async def _strike_on(strikes: Strikes, every_s: float, until_s: float, tell: Telling) -> None:
    """The last one comes early enough to be seen under load."""
    while time.monotonic() + every_s / 2 < until_s:
        try:
            await strikes.next(every_s, tell.struck)
        except Exception as error:
            tell.trouble(error)
            await asyncio.sleep(every_s)


def _exits(here: World, strikes: Strikes) -> list[str]:
    unasked = {id: len(lives) - 1 - strikes.ended[id] for id, lives in here.lives.items()}
    return [f"{id} ended {count} times by itself" for id, count in sorted(unasked.items()) if count > 0]
