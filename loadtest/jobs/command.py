"""Arguments, the run on simulated workers, and its report."""

from __future__ import annotations

import argparse
import asyncio
import json
from dataclasses import asdict
from pathlib import Path

from loadtest.jobs.measure import JobFigures, measure_jobs
from loadtest.router.rig import MODEL, rig
from pdbus.client import connect


def arguments(argv: list[str]) -> argparse.Namespace:
    made = argparse.ArgumentParser(
        prog="python -m loadtest jobs",
        description="Durable jobs a second, with workers that answer at once: what storing them costs.",
    )
    made.add_argument("--jobs", type=int, default=500, help="(default: %(default)s)")
    made.add_argument("--callers", nargs="+", type=int, default=[1, 16], metavar="N", help="at once (default: 1 16)")
    made.add_argument("--tokens", type=int, default=8, help="of each answer (default: %(default)s)")
    made.add_argument("--routers", type=int, default=1, help="(default: %(default)s)")
    made.add_argument("--json", type=Path, metavar="FILE", help="write all figures there")
    given = made.parse_args(argv)
    if min(given.jobs, given.tokens, given.routers, *given.callers) < 1:
        made.error("everything must be positive")
    return given


def main(argv: list[str]) -> int:
    given = arguments(argv)
    found = asyncio.run(_run(given))
    print("\n".join(line for figures in found for line in figures.lines()))
    if given.json:
        given.json.write_text(json.dumps([asdict(figures) for figures in found], indent=2) + "\n")
    return 1 if any(figures.failed for figures in found) else 0


async def _run(given: argparse.Namespace) -> list[JobFigures]:
    async with rig(given.routers) as running, connect(running.nats_url, MODEL) as client:
        await measure_jobs(client, 20, 4, given.tokens, running.pids)
        return [
            await measure_jobs(client, given.jobs, callers, given.tokens, running.pids) for callers in given.callers
        ]
