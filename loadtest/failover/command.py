"""Arguments, the trials of each row, and the report."""

from __future__ import annotations

import argparse
import asyncio
import signal
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import aiohttp

from loadtest.client import ask, session
from loadtest.failover.trial import ANSWER_S, Trial, percentile, trial
from loadtest.markdown import markdown
from loadtest.measurement import options, parsed, parser, report
from loadtest.prompts import Prompts, completion
from loadtest.stack import Stack, stack
from pdbus.bus.bus import connect
from pdbus.bus.presence import Fleet
from pdbus.context import Deadline

FROM = {"snapshot": (("--cache-nodes", "1"), "100"), "recompute": (("--cache-nodes", "0"), "0")}
"""Where the next attempt has the KV from: options of `pdbus up`, and PDBUS_SNAPSHOT_TOKENS."""
HOW = {"kill": signal.SIGKILL, "stop": signal.SIGSTOP}


@dataclass(frozen=True)
class Row:
    """The trials of one way to go on after one way to die."""

    source: str
    how: str
    trials: tuple[Trial, ...]
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
            "failed": sum(one.failed for one in self.trials),
            "wrong": self.wrong,
        }


def arguments(argv: list[str]) -> argparse.Namespace:
    about = "From the death of a decode worker (kill -9, SIGSTOP) to the next token of each stream that it was writing."
    made = parser("failover", about, 1)
    made.add_argument("--trials", type=int, default=5, help="of each row (default: %(default)s)")
    made.add_argument("--streams", type=int, default=8, help="at a time (default: %(default)s)")
    made.add_argument("--prompt-tokens", type=int, default=200, help="of each stream (default: %(default)s)")
    made.add_argument("--new-tokens", type=int, default=300, help="likewise (default: %(default)s)")
    made.add_argument("--after-tokens", type=int, default=150, help="written before it dies (default: %(default)s)")
    return parsed(made, argv)


def main(argv: list[str]) -> int:
    given = arguments(argv)
    rows = asyncio.run(measure(given))
    report(given, render(rows), {"rows": [row.as_json() for row in rows]})
    return 0 if not any(row.wrong or found["failed"] for row in rows for found in (row.as_json(),)) else 1


async def measure(given: argparse.Namespace) -> list[Row]:
    """A row for each way to go on and each way to die; `rounds` stacks for each way to go on."""
    found: dict[tuple[str, str], tuple[list[Trial], int]] = {(a, b): ([], 0) for a in FROM for b in HOW}
    prompts = Prompts.of(given.model)
    for number in range(given.rounds):
        for source, (flags, snapshot_tokens) in FROM.items():
            up = (*options(given), "--decode", "2", *flags)
            async with stack(*up, env={"PDBUS_SNAPSHOT_TOKENS": snapshot_tokens}) as running, session() as http:
                for how in HOW:
                    trials, wrong = await _trials(running, http, prompts, given, how, f"{number}/{source}/{how}")
                    before, counted = found[source, how]
                    found[source, how] = (before + trials, counted + wrong)
                    row = Row(source, how, tuple(trials), wrong)
                    print(f"round {number + 1}: {row.as_json()}", file=sys.stderr, flush=True)
    return [Row(source, how, tuple(trials), wrong) for (source, how), (trials, wrong) in found.items()]


async def _trials(
    running: Stack, http: aiohttp.ClientSession, prompts: Prompts, given: argparse.Namespace, how: str, label: str
) -> tuple[list[Trial], int]:
    """The trials, and how many of their answers are wrong."""
    trials, wrong = [], 0
    async with connect(running.nats_url, name="loadtest") as bus, Fleet(bus) as fleet:
        await fleet.wait_for(lambda fleet: len(fleet.live("decode")) == 2, Deadline.after(ANSWER_S))
        for number in range(given.trials):
            bodies = [
                completion(running.model, prompts.draw(f"{label}/{number}/{at}", given.prompt_tokens), given.new_tokens)
                | {"return_token_ids": True}
                for at in range(given.streams)
            ]
            trials.append(await trial(http, running, fleet, bodies, HOW[how], given.after_tokens))
            wrong += await _wrong(http, running, bodies, trials[-1])
    return trials, wrong


async def _wrong(http: aiohttp.ClientSession, running: Stack, bodies: Sequence[dict[str, Any]], one: Trial) -> int:
    """Asks for the same again, undisturbed."""
    again = await asyncio.gather(*(ask(http, running.url, body, 0.0, 0.0, ANSWER_S) for body in bodies))
    return sum(answer.ok and answer.ids != same.ids for answer, same in zip(one.answers, again, strict=True))


def render(rows: Sequence[Row]) -> str:
    head = ["goes on from", "worker", "streams", "next token p50 s", "p99 s", "others p99 s", "failed", "wrong"]
    lines = []
    for row in rows:
        seen = row.as_json()
        times = [f"{seen[name]:.2f}" for name in ("p50_s", "p99_s", "others_p99_s")]
        lines.append([row.source, row.how, str(seen["streams"]), *times, str(seen["failed"]), str(seen["wrong"])])
    return markdown(head, lines)
