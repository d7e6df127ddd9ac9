"""Goal 5, its second half: from the start of a new worker's process to its first tokens in an answer."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Mapping
from pathlib import Path

from loadtest.goals import Row, at_most
from loadtest.processes import process
from loadtest.prompts import Prompts
from loadtest.report import percentile
from loadtest.weights.load import Loader
from loadtest.weights.terms import Subject, Terms, subject
from pdbus.bus.bus import connect
from pdbus.bus.presence import Fleet
from pdbus.context import Deadline
from pdbus.messages.router import TokenFrame
from pdbus.stack.launcher import lifeline_pipe
from pdbus.subjects import ANY, TOKENS
from pdbus.tasks import cancelled

_GOAL_S = 10.0
_PATIENCE_S = 120.0
_STREAMS = 4


async def measure(terms: Terms) -> list[Row]:
    count = 1 if terms.short else 5
    loader = Loader(Prompts.of(terms.model))
    ready_s: list[float] = []
    served_s: list[float] = []
    async with subject(terms) as on:
        await loader.closed(on, _STREAMS, 2.0)
        for number in range(count):
            ready, served = await _join(on, loader, f"decode-new-{number}")
            ready_s.append(ready)
            served_s.append(served)
    how = (
        f"p99 (the largest) of {count} new decode workers beside {_STREAMS} streams, from the start of the process to "
        f"its first tokens in an answer; ready after {percentile(ready_s, 50):.1f} s (p50)"
    )
    return [at_most("a new worker joins and serves", percentile(served_s, 99), _GOAL_S, "s", how, ready_s=ready_s)]


async def _join(on: Subject, loader: Loader, id: str) -> tuple[float, float]:
    """Seconds until it is ready, and until it has served."""
    busy = asyncio.create_task(_keep_busy(on, loader))
    try:
        async with connect(on.stack.nats_url, name="loadtest join") as bus, Fleet(bus) as fleet:
            served = asyncio.Event()

            def hear(frame: TokenFrame) -> None:
                if frame.worker == id and any(item.ids for item in frame.items):
                    served.set()

            async with await bus.subscribe(TOKENS(router=ANY), hear):
                with lifeline_pipe() as lifeline:
                    start = time.perf_counter()
                    async with process(["-m", "pdbus.decode"], _environment(on, id, lifeline), lifeline):
                        await fleet.wait_for(lambda known: _is_ready(known, id), Deadline.after(_PATIENCE_S))
                        ready = time.perf_counter() - start
                        async with asyncio.timeout(_PATIENCE_S):
                            await served.wait()
                        return ready, time.perf_counter() - start
    finally:
        await cancelled(busy)


def _is_ready(fleet: Fleet, id: str) -> bool:
    card = fleet.card(id)
    return card is not None and card.state == "ready"


async def _keep_busy(on: Subject, loader: Loader) -> None:
    while True:
        await loader.closed(on, _STREAMS, 5.0)


def _environment(on: Subject, id: str, lifeline: int) -> Mapping[str, str]:
    """That of the stack's own decode worker, but for what is of one process only."""
    (pid, *_) = on.stack.pids("decode").values()
    text = Path(f"/proc/{pid}/environ").read_bytes().decode()
    known = dict(line.split("=", 1) for line in text.split("\0") if "=" in line)
    # The ledger of cores is a descriptor of that process.
    cores = {"PDBUS_CORES_FILE": known.get("PDBUS_CORES_FILE", "").replace("/proc/self/", f"/proc/{pid}/")}
    own = {"PDBUS_ID": id, "PDBUS_DATA": str(on.stack.data / id), "PDBUS_LIFELINE_FD": str(lifeline)}
    return {**os.environ, **known, **cores, **own}
