"""A NATS server, a param-server in a process of its own, and the measurement on them."""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import tempfile
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import asdict
from pathlib import Path

from loadtest.processes import process
from loadtest.tiny import tiny_checkpoint
from loadtest.weights_rows.measure import RowsReport, measure
from pdbus.bus.bus import connect
from pdbus.bus.presence import Fleet
from pdbus.context import Deadline
from pdbus.stack.launcher import lifeline_pipe
from pdbus.stack.nats_server import embedded_nats

MODEL = "rows"


@asynccontextmanager
async def serving(servers: int = 1) -> AsyncIterator[str]:
    """The URL of a NATS server at which so many param-servers serve a small model by the name of `rows`."""
    with tempfile.TemporaryDirectory() as folder:
        checkpoint = tiny_checkpoint(Path(folder, "checkpoint"))
        async with (
            embedded_nats(Path(folder, "nats")) as nats,
            connect(nats.url, name="loadtest") as bus,
            Fleet(bus) as fleet,
            AsyncExitStack() as life,
        ):
            lifeline = life.enter_context(lifeline_pipe())
            shared = {"NATS_URL": nats.url, "PDBUS_MODEL": MODEL, "PDBUS_CHECKPOINT": str(checkpoint)}
            for number in range(servers):
                own = {"PDBUS_ID": f"rows-{number}", "PDBUS_DATA": f"{folder}/{number}"}
                env = {**os.environ, **shared, **own, "PDBUS_LIFELINE_FD": str(lifeline)}
                await life.enter_async_context(process(["-m", "pdbus.param_server"], env, lifeline))
            await fleet.wait_for(
                lambda fleet: sum(card.state == "ready" for card in fleet.live("param_server")) == servers,
                Deadline.after(60),
            )
            yield nats.url


def arguments(argv: list[str]) -> argparse.Namespace:
    made = argparse.ArgumentParser(prog="python -m loadtest weights_rows", description=measure.__doc__)
    made.add_argument("--rows", type=int, default=10_000_000, help="of the table (default: %(default)s)")
    made.add_argument("--rate", type=float, default=12_000, help="single-row updates a second (default: %(default)s)")
    made.add_argument("--duration", type=float, default=10.0, help="seconds (default: %(default)s)")
    made.add_argument("--servers", type=int, default=1, help="param-servers (default: %(default)s)")
    made.add_argument("--seal", action="store_true", help="and how long sealing the table takes then")
    made.add_argument("--json", type=Path, metavar="FILE", help="write all figures there")
    return made.parse_args(argv)


def main(argv: list[str]) -> int:
    given = arguments(argv)
    found = asyncio.run(_run(given))
    print("\n".join(found.lines()))
    if given.json:
        given.json.write_text(json.dumps(asdict(found), indent=2) + "\n")
    return 0 if found.stale == 0 else 1


async def _run(given: argparse.Namespace) -> RowsReport:
    async with serving(given.servers) as url:
        return await measure(url, MODEL, rows=given.rows, per_s=given.rate, seconds=given.duration, seal=given.seal)
