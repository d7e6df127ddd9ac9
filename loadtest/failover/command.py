"""Arguments, the trials of each row, and the report."""

from __future__ import annotations

import argparse
import asyncio
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp

from loadtest.chaos.nats import CutNats, cut_nats
from loadtest.checker.records import read
from loadtest.client import ask, session
from loadtest.failover.itl import Itl, measure_itl
from loadtest.failover.phases import Phases, phases
from loadtest.failover.trial import ANSWER_S, KILL, STOP, Trial, Way, cut_by, percentile, trial
from loadtest.markdown import markdown
from loadtest.measurement import options, parsed, parser, report
from loadtest.prompts import Prompts, completion
from loadtest.stack import Stack, stack_in
from pdbus.bus.bus import connect
from pdbus.bus.presence import Fleet
from pdbus.context import Deadline

FROM = {"snapshot": (("--cache-nodes", "1"), "100"), "recompute": (("--cache-nodes", "0"), "0")}
"""Where the next attempt has the KV from: options of `pdbus up`, and PDBUS_SNAPSHOT_TOKENS."""
HOW = ("kill", "stop", "cut")
PARTS = ("next-token", "itl")


@dataclass(frozen=True)
class Row:
    """The trials of one way to go on after one way to die."""

    source: str
    how: str
    trials: tuple[Trial, ...]
    phases: tuple[Phases, ...]
    """Of the answers that went on elsewhere."""
    wrong: int
    """Answers that differ from those of an undisturbed run."""

    @property
    def waits_s(self) -> list[float]:
        return [wait for one in self.trials for wait in one.next_token_s]

    def as_json(self) -> dict[str, Any]:
        return {
            "from": self.source,
            "how": self.how,
            "streams": len(self.waits_s),
            "p50_s": percentile(self.waits_s, 0.5),
            "p99_s": percentile(self.waits_s, 0.99),
            "others_p99_s": percentile([wait for one in self.trials for wait in one.others_s], 0.99),
            "noticed_p50_s": percentile([one.noticed_s for one in self.phases], 0.5),
            "noticed_p99_s": percentile([one.noticed_s for one in self.phases], 0.99),
            "read_p50_s": percentile([one.read_s for one in self.phases], 0.5),
            "read_p99_s": percentile([one.read_s for one in self.phases], 0.99),
            "failed": sum(one.failed for one in self.trials),
            "wrong": self.wrong,
        }


def arguments(argv: list[str]) -> argparse.Namespace:
    about = (
        "From the loss of a decode worker (kill -9, SIGSTOP, cut off from the network) to the next token of each "
        "stream that it was writing, and what snapshots cost while nothing is lost."
    )
    made = parser("failover", about, 1)
    made.add_argument("--short", action="store_true", help="a look: one trial of each row, and three rounds of ITL")
    made.add_argument("--only", nargs="+", choices=PARTS, default=PARTS, metavar="PART", help=", ".join(PARTS))
    made.add_argument("--trials", type=int, default=5, help="of each row (default: %(default)s)")
    made.add_argument("--itl-rounds", type=int, default=9, help="with and without snapshots (default: %(default)s)")
    made.add_argument("--streams", type=int, default=8, help="at a time (default: %(default)s)")
    made.add_argument("--prompt-tokens", type=int, default=200, help="of each stream (default: %(default)s)")
    made.add_argument("--new-tokens", type=int, default=300, help="likewise (default: %(default)s)")
    made.add_argument("--after-tokens", type=int, default=150, help="written before it is lost (default: %(default)s)")
    given = parsed(made, argv)
    if given.short:
        given.rounds = given.trials = 1
        given.itl_rounds = 3
    return given


def main(argv: list[str]) -> int:
    given = arguments(argv)
    rows = asyncio.run(measure(given)) if "next-token" in given.only else []
    itl = asyncio.run(measure_itl(given)) if "itl" in given.only else None
    found = {"rows": [row.as_json() for row in rows], "itl": itl.as_json() if itl else None}
    report(given, render(rows, itl), found)
    return 0 if not any(row.wrong or row.as_json()["failed"] for row in rows) else 1


async def measure(given: argparse.Namespace) -> list[Row]:
    """A row for each way to go on and each way to be lost; `rounds` stacks for each way to go on."""
    rows = {(source, how): Row(source, how, (), (), 0) for source in FROM for how in HOW}
    prompts = Prompts.of(given.model)
    for number in range(given.rounds):
        for source in FROM:
            with tempfile.TemporaryDirectory(prefix="pdbus-load-", ignore_cleanup_errors=True) as temporary:
                async with cut_nats(Path(temporary) / "nats") as nats:
                    for row in await _of_stack(given, prompts, Path(temporary), nats, source, number):
                        before = rows[source, row.how]
                        rows[source, row.how] = Row(
                            source,
                            row.how,
                            before.trials + row.trials,
                            before.phases + row.phases,
                            before.wrong + row.wrong,
                        )
                        print(f"round {number + 1}: {row.as_json()}", file=sys.stderr, flush=True)
    return list(rows.values())


async def _of_stack(
    given: argparse.Namespace, prompts: Prompts, folder: Path, nats: CutNats, source: str, number: int
) -> list[Row]:
    flags, snapshot_tokens = FROM[source]
    history = folder / "history"
    history.mkdir()
    env = {"PDBUS_SNAPSHOT_TOKENS": snapshot_tokens, "PDBUS_HISTORY": str(history), "NATS_URL": nats.cut_url}
    ways: dict[str, Way] = {"kill": KILL, "stop": STOP, "cut": cut_by(nats.proxy)}
    rows = []
    up = (*options(given), "--decode", "2", *flags)
    async with stack_in(folder / "data", *up, env=env) as running, session() as http:
        for how in HOW:
            trials, wrong = await _trials(running, nats, http, prompts, given, ways[how], f"{number}/{source}/{how}")
            events = await asyncio.to_thread(read, history)
            told = [phase for one in trials for phase in phases(events, one.hit_ns, one.end_ns)]
            rows.append(Row(source, how, tuple(trials), tuple(told), wrong))
    return rows


async def _trials(
    running: Stack,
    nats: CutNats,
    http: aiohttp.ClientSession,
    prompts: Prompts,
    given: argparse.Namespace,
    how: Way,
    label: str,
) -> tuple[list[Trial], int]:
    """The trials, and how many of their answers are wrong."""
    trials, wrong = [], 0
    async with connect(nats.url, name="loadtest") as bus, Fleet(bus) as fleet:
        await fleet.wait_for(lambda fleet: len(fleet.live("decode")) == 2, Deadline.after(ANSWER_S))
        for number in range(given.trials):
            bodies = [
                completion(running.model, prompts.draw(f"{label}/{number}/{at}", given.prompt_tokens), given.new_tokens)
                | {"return_token_ids": True}
                for at in range(given.streams)
            ]
            trials.append(await trial(http, running, fleet, bodies, how, given.after_tokens))
            wrong += await _wrong(http, running, bodies, trials[-1])
    return trials, wrong


async def _wrong(http: aiohttp.ClientSession, running: Stack, bodies: Sequence[dict[str, Any]], one: Trial) -> int:
    """Asks for the same again, undisturbed. Raises RuntimeError where that fails: then nothing can be said."""
    again = await asyncio.gather(*(ask(http, running.url, body, 0.0, 0.0, ANSWER_S) for body in bodies))
    if broken := [answer.error for answer in again if not answer.ok]:
        raise RuntimeError(f"an undisturbed answer failed: {broken[0]}")
    return sum(answer.ok and answer.ids != same.ids for answer, same in zip(one.answers, again, strict=True))


def render(rows: Sequence[Row], itl: Itl | None) -> str:
    """Seconds, and for ITL milliseconds."""
    told = []
    if rows:
        names = ["next token p50 s", "p99 s", "of it noticed p50", "p99", "read again p50", "p99", "others p99 s"]
        keys = ["p50_s", "p99_s", "noticed_p50_s", "noticed_p99_s", "read_p50_s", "read_p99_s", "others_p99_s"]
        lines = []
        for row in rows:
            seen = row.as_json()
            times = [f"{seen[key]:.2f}" for key in keys]
            lines.append([row.source, row.how, str(seen["streams"]), *times, str(seen["failed"]), str(seen["wrong"])])
        told.append(markdown(["goes on from", "worker", "streams", *names, "failed", "wrong"], lines))
    if itl:
        seen = itl.as_json()
        lines = [
            [name, *(f"{1e3 * seen[f'{key}_{share}']:.1f}" for share in (0.5, 0.99))]
            for name, key in (("every 100 tokens", "with"), ("none", "without"))
        ]
        costs = [
            f"{what} {100 * (seen[key] - 1):+.1f} %"
            for what, key in (("time", "ratio"), ("processor time", "cpu_ratio"))
        ]
        cost = f"per token, with snapshots: {', '.join(costs)} (medians of {len(itl.ratios)} rounds)"
        told += [markdown(["snapshots", "ITL p50 ms", "p99 ms"], lines), cost]
    return "\n\n".join(told)
