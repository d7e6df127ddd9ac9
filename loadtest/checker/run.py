"""A stack of real processes on the watermark model, under load, changes and faults; and what the checkers say of it."""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
import subprocess
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import AbstractAsyncContextManager, AsyncExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from loadtest.checker import watermark_files
from loadtest.checker.answers import Answers, Judgement, judge
from loadtest.checker.changes import Changes, commit
from loadtest.checker.faults import Fault, ProcessFaults
from loadtest.checker.history import verify
from loadtest.checker.records import Verdict, read
from loadtest.checker.watermark import Marks
from loadtest.proxied import proxied, tell
from loadtest.stack import Stack, stack_in
from pdbus.bus.bus import connect
from pdbus.bus.presence import Fleet
from pdbus.client.weights import Weights
from pdbus.context import RequestContext
from pdbus.errors import PdbusError
from pdbus.peers.history import HistoryFollower
from pdbus.peers.weights import BlockReader
from pdbus.stack.nats_server import embedded_nats
from pdbus.tasks import cancelled

MODEL = "watermark"
_ENV = {
    "PDBUS_PRECISION": "fp32",
    "PDBUS_KV_DTYPE": "fp32",
    "PDBUS_KV_BYTES": str(8 << 20),
    "PDBUS_CACHE_BYTES": str(64 << 20),
    "PDBUS_ROLLBACK_WINDOW_S": "4",
    "PDBUS_LONGEST_DEADLINE_S": "20",
    "PDBUS_LOG_LEVEL": "INFO",
}
_CHANGE_EVERY_S = 1.0
_WRITERS = 3
"""At work at once, so that some commits conflict: each has a change every few seconds."""
_QUIET_S = 60.0


@dataclass(frozen=True)
class Wanted:
    answers: int = 10_000
    minutes: float = 5.0
    rate: float = 40.0
    seed: int = 0
    fault_every_s: float = 5.0
    keep: Path | None = None
    """A folder to leave logs and histories in."""


@dataclass
class Found:
    seed: int
    seconds: float
    judgement: Judgement
    verdict: Verdict
    changes: Counter[str]
    refused_changes: Counter[str]
    messages: Counter[str]
    """Of the bus that were hit, by kind and fault."""
    faults: list[Fault]
    served_again_s: dict[int, float] = field(default_factory=dict)
    """By the fault's number, until an answer that was asked for after it was there."""
    unread: list[str] = field(default_factory=list)
    """Retained roots of which something could not be read in the end."""
    settled: bool = False
    """In the end, without faults, a commit was followed by its ref and answered from."""

    @property
    def sound(self) -> bool:
        judged = self.judgement
        bad = judged.wrong or judged.mixed or judged.failed or self.verdict.violations or self.unread
        return not bad and self.settled and judged.right > 0 and all(fault.back_s is not None for fault in self.faults)


@contextmanager
def _faulty(nats_url: str, seed: int, hit: Counter[str]) -> Iterator[tuple[str, subprocess.Popen[str]]]:
    """The URL of a proxy in front of the server, and its process, to be told `on` and `off`. `hit`: what it did."""
    with proxied("loadtest.checker.proxy", nats_url, str(seed)) as (url, proxy):
        yield url, proxy
        with contextlib.suppress(ValueError):
            hit.update(json.loads(proxy.communicate(timeout=10)[0] or "{}"))


def _stack(folder: Path, nats_url: str) -> AbstractAsyncContextManager[Stack]:
    checkpoint = watermark_files.write(folder / "checkpoint", Marks())
    env = {**_ENV, "NATS_URL": nats_url, "PDBUS_HISTORY": str(folder / "history")}
    counts = ("--param-servers", "2", "--decode", "2", "--prefill", "1", "--cache-nodes", "2")
    return stack_in(folder / "data", "--model", str(checkpoint), "--name", MODEL, *counts, env=env)


async def consistency(wanted: Wanted) -> Found:
    """Runs for `minutes`, or until so many answers were asked for. Raises Refused where no stack comes up."""
    with tempfile.TemporaryDirectory(prefix="pdbus-consistency-", ignore_cleanup_errors=True) as temporary:
        folder = wanted.keep or Path(temporary)
        folder.mkdir(parents=True, exist_ok=True)
        messages: Counter[str] = Counter()
        async with AsyncExitStack() as life:
            nats = await life.enter_async_context(embedded_nats(folder / "nats"))
            url, proxy = life.enter_context(_faulty(nats.url, wanted.seed, messages))
            stack = await life.enter_async_context(_stack(folder, url))
            found = await _drive(wanted, stack, nats.url, url, proxy)
        found.messages = messages
        found.verdict = verify(read(folder / "history"))
        return found


async def _drive(wanted: Wanted, stack: Stack, nats_url: str, url: str, proxy: subprocess.Popen[str]) -> Found:
    """`nats_url`: without faults, for looking on; `url`: with them."""
    rng = random.Random(wanted.seed)
    began_s = time.monotonic()
    async with AsyncExitStack() as life:
        quiet = await life.enter_async_context(connect(nats_url, name="checker"))
        faulty = await life.enter_async_context(connect(url, name="checker writer"))
        fleet = await life.enter_async_context(Fleet(quiet))
        follower = await life.enter_async_context(HistoryFollower(quiet, MODEL))
        weights = Weights(faulty, MODEL)
        life.push_async_callback(weights.close)
        answers = Answers(stack.url, MODEL, random.Random(rng.random()))
        changes = Changes(weights, url, MODEL, random.Random(rng.random()))
        faults = ProcessFaults(stack, fleet, random.Random(rng.random()))
        follower.on_change(lambda history: answers.roots.__setitem__(slice(None), [r.hex() for r in history.wanted]))
        await _known(weights)
        tell(proxy, "on")
        beside = [
            *(asyncio.create_task(changes.run(_WRITERS * _CHANGE_EVERY_S)) for _ in range(_WRITERS)),
            asyncio.create_task(faults.run(wanted.fault_every_s)),
        ]
        asking = asyncio.create_task(answers.run(wanted.rate, wanted.answers))
        await asyncio.wait([asking, *beside], timeout=60 * wanted.minutes, return_when=asyncio.FIRST_COMPLETED)
        await cancelled(*beside)
        tell(proxy, "off")
        await faults.back()
        settled = await _settles(changes, answers)
        await cancelled(asking)
        seconds = time.monotonic() - began_s
        unread = await _unread(BlockReader(quiet, MODEL, follower), follower)
        await changes.see()
        versions = {root.hex(): marks for root, marks in changes.known.items()}
        done = [answer for answer in answers.all if answer.end_s]
        return Found(
            wanted.seed,
            seconds,
            judge(done, versions),
            Verdict(),
            changes.done,
            changes.refused,
            Counter(),
            faults.all,
            _served_again(faults.all, answers),
            unread,
            settled,
        )


async def _known(weights: Weights) -> None:
    """Returns once the log is known; a busy machine may take a while."""
    async with asyncio.timeout(_QUIET_S):
        while True:
            with contextlib.suppress(PdbusError):
                await weights.history()
                return


async def _settles(changes: Changes, answers: Answers) -> bool:
    """Whether, now that nothing is broken any more, one more commit goes through, and an answer comes from it."""
    until_s = time.monotonic() + _QUIET_S
    while time.monotonic() < until_s:
        with contextlib.suppress(PdbusError):
            history = await changes.see()
            head = history.head("stable")
            assert head
            after = Marks.pure(changes.number())
            root = (await commit(changes.weights, changes.known[head], after)).root
            changes.known[root] = after
            if not await changes.settle(root, until_s - time.monotonic()):
                continue
            if (await answers.one()).root == root.hex():
                return True
        await asyncio.sleep(0.2)
    return False


async def _unread(reader: BlockReader, follower: HistoryFollower) -> list[str]:
    """Every wanted root has to be there whole."""
    missing = []
    for root in follower.history.wanted:
        try:
            await reader.tensors(root, RequestContext.after(20.0))
        except PdbusError as error:
            missing.append(f"{root.hex()[:12]}: {error.message}")
    return missing


def _served_again(faults: list[Fault], answers: Answers) -> dict[int, float]:
    found = {}
    for number, fault in enumerate(faults):
        ends = [answer.end_s for answer in answers.all if answer.ids and answer.sent_s >= fault.at_s]
        if ends:
            found[number] = min(ends) - fault.at_s
    return found
