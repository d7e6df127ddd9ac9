"""Arguments, the run, and its report."""

from __future__ import annotations

import argparse
import asyncio
import statistics
from collections import Counter
from collections.abc import Iterable
from pathlib import Path

import uvloop

from loadtest.checker.records import GUARANTEES
from loadtest.checker.run import Found, Wanted, consistency
from loadtest.markdown import markdown

_MEANINGS = {
    "G1": "one root in an answer",
    "G2": "a version whole or not at all",
    "G3": "no older root 5 s after its ref moved",
    "G4": "caches give what the root made",
    "G5": "no fill survives its invalidation",
    "G6": "no gap goes unnoticed",
}
_TOLD = 5


def arguments(argv: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m loadtest consistency",
        description="Answers of a model that tells its versions, while weights change every second, messages are lost, "
        "doubled, delayed and reordered, and processes are killed and stopped.",
    )
    parser.add_argument("--answers", type=int, default=10_000, help="most to ask for (default: %(default)s)")
    parser.add_argument("--minutes", type=float, default=10.0, help="most to run (default: %(default)s)")
    parser.add_argument("--rate", type=float, default=40.0, help="answers a second (default: %(default)s)")
    parser.add_argument("--fault-every", type=float, default=5.0, metavar="S", help="seconds (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="of load, changes and faults (default: %(default)s)")
    parser.add_argument("--keep", type=Path, metavar="DIR", help="leave logs and histories there")
    given = parser.parse_args(argv)
    if min(given.answers, given.minutes, given.rate, given.fault_every) <= 0:
        parser.error("everything must be positive")
    return given


def main(argv: list[str]) -> int:
    given = arguments(argv)
    wanted = Wanted(given.answers, given.minutes, given.rate, given.seed, given.fault_every, given.keep)
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        found = runner.run(consistency(wanted))
    print(render(found))
    return 0 if found.sound else 1


def render(found: Found) -> str:
    """Tables for a person: answers, guarantees, faults, and the evidence of whatever is wrong."""
    judged, verdict = found.judgement, found.verdict
    counts = [
        ("right", judged.right),
        ("refused, clear and retryable", sum(judged.refused.values())),
        ("failed otherwise", sum(judged.failed.values())),
        ("wrong", len(judged.wrong)),
        ("**mixed**", len(judged.mixed)),
    ]
    parts = [
        f"seed {found.seed}, {found.seconds:.0f} s, {judged.roots} versions, {judged.cached} answers used caches",
        markdown(["answers", "number"], [[name, str(count)] for name, count in counts]),
        markdown(
            ["guarantee", "", "events", "violations", "a million", "at most (95 %)"],
            [[name, _MEANINGS[name], *_guarantee(found, name)] for name in GUARANTEES],
        ),
        markdown(["fault", "times", "served again (s)", "back (s)"], _faults(found)),
        f"messages hit: {_listed(found.messages)}",
        f"changes: {_listed(found.changes)}; refused: {_listed(found.refused_changes)}",
        f"refusals: {_listed(judged.refused)}",
        "in the end: " + ("a commit was answered from" if found.settled else "**no commit came through**"),
    ]
    wrong = [*judged.mixed, *judged.wrong, *found.unread, *(violation.told for violation in verdict.violations)]
    wrong += [f"{count} x {reason}" for reason, count in judged.failed.items()]
    parts += [f"- {line}" for line in wrong[: 4 * _TOLD]]
    return "\n\n".join(parts)


def _guarantee(found: Found, name: str) -> list[str]:
    verdict = found.verdict
    rate, bound = verdict.per_million(name)
    return [str(verdict.events[name]), str(verdict.count(name)), f"{rate:.0f}", f"{bound:.0f}"]


def _faults(found: Found) -> list[list[str]]:
    """By kind and service: how often, the longest time to the next answer, and until the process was ready again."""
    groups: dict[tuple[str, str], list[int]] = {}
    for number, fault in enumerate(found.faults):
        groups.setdefault((fault.kind, fault.process.rsplit("-", 1)[0]), []).append(number)
    rows = []
    for (kind, service), numbers in sorted(groups.items()):
        served = [found.served_again_s.get(number) for number in numbers]
        back = [found.faults[number].back_s for number in numbers]
        rows.append([f"{kind} {service}", str(len(numbers)), _times(served), _times(back)])
    return rows


def _times(seconds: Iterable[float | None]) -> str:
    known = [value for value in seconds if value is not None]
    never = sum(value is None for value in seconds)
    told = f"median {statistics.median(known):.1f}, at most {max(known):.1f}" if known else ""
    return f"{told}{f', never: {never}' if never else ''}"


def _listed(counts: Counter[str]) -> str:
    return ", ".join(f"{count} {name}" for name, count in counts.most_common()) or "none"
