"""A process with a simulated prefill and decode worker, for real routers on a real bus.

It takes NATS_URL and PDBUS_MODEL as every service does, serves the newest version that the change log names, and ends
with SIGTERM or with its launcher. Then it writes when each token was handed to the bus, as JSON: a list per request, in
order of their arrival, of moments on the machine's monotonic clock, which all processes share.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import signal
import time
from contextlib import AsyncExitStack
from pathlib import Path

import uvloop

from loadtest.simulated import SimulatedWorker
from loadtest.simulated_behaviour import Behaviour
from loadtest.simulated_peers import Peers
from pdbus.bus.bus import connect
from pdbus.context import Deadline
from pdbus.messages.router import TokenFrame
from pdbus.peers.history import HistoryFollower
from pdbus.runtime.collector import rare_collections
from pdbus.runtime.lifeline import lifeline
from pdbus.settings import Settings, load

_READY_S = 120.0


class Stamps:
    """When each token left, by request. Only the first time of each counts."""

    def __init__(self) -> None:
        self._left: dict[str, dict[int, float]] = {}

    def frame(self, frame: TokenFrame) -> tuple[TokenFrame, ...]:
        now = time.monotonic()
        for item in frame.items:
            if item.ids:
                self._left.setdefault(item.request_id, {}).setdefault(item.index, now)
        return (frame,)

    def as_json(self) -> list[list[float]]:
        return [[moment for _, moment in sorted(tokens.items())] for tokens in self._left.values()]


async def serve(settings: Settings, step_s: float, stamps: Stamps) -> None:
    """Until it is told to stop."""
    stop, peers = asyncio.Event(), Peers()
    loop = asyncio.get_running_loop()

    def lost() -> None:
        loop.call_soon_threadsafe(stop.set)

    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    with lifeline(settings.lifeline_fd, lost):
        async with AsyncExitStack() as stack:
            bus = await stack.enter_async_context(connect(settings.nats_url, name="workers", wait_s=_READY_S))
            await bus.logs.ensure()
            follower = await stack.enter_async_context(HistoryFollower(bus, settings.model))
            await follower.wait_for(lambda history: bool(history.wanted), Deadline.after(_READY_S))
            for service in ("prefill", "decode"):
                own = await stack.enter_async_context(connect(settings.nats_url, name=service))
                worker = SimulatedWorker(service, f"{service}-1", own, follower.history.wanted, settings.model, peers)
                worker.behaviour = Behaviour(step_s=step_s, tamper=stamps.frame)
                await stack.enter_async_context(worker)
            with rare_collections():
                await stop.wait()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--step-s", type=float, default=0.0)
    parser.add_argument("--stamps", type=Path, required=True)
    given = parser.parse_args()
    stamps = Stamps()
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(serve(load(Settings), given.step_s, stamps))
    given.stamps.write_text(json.dumps(stamps.as_json()))


if __name__ == "__main__":
    main()
