"""What the processes of a run recorded (pdbus/recording.py): events, the change log put together from them, and what
is found wrong in them."""

from __future__ import annotations

import json
import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

GUARANTEES = ("G1", "G2", "G3", "G4", "G5", "G6")


@dataclass(frozen=True, slots=True)
class Event:
    """`number`: its place among the events of its process, from 1 on."""

    process: str
    number: int
    time_ns: int
    kind: str
    fields: Mapping[str, Any]

    def __getattr__(self, name: str) -> Any:
        """A field; None where it is absent."""
        return self.fields.get(name)

    @property
    def told(self) -> str:
        fields = " ".join(f"{name}={value}" for name, value in self.fields.items())
        return f"{self.process} #{self.number} at {self.time_ns / 1e9:.3f}: {self.kind} {fields}"


@dataclass(frozen=True, slots=True)
class Violation:
    guarantee: str
    what: str
    evidence: tuple[Event, ...]

    @property
    def told(self) -> str:
        return "\n    ".join([f"{self.guarantee}: {self.what}", *(event.told for event in self.evidence)])


@dataclass
class Verdict:
    """`events`: by guarantee, those that it was judged by."""

    events: Counter[str] = field(default_factory=Counter)
    violations: list[Violation] = field(default_factory=list)

    def count(self, guarantee: str) -> int:
        return sum(violation.guarantee == guarantee for violation in self.violations)

    def per_million(self, guarantee: str) -> tuple[float, float]:
        """Violations in a million events, and the upper end of the 95 % confidence interval. (inf, inf) of none."""
        events, found = self.events[guarantee], self.count(guarantee)
        if not events:
            return math.inf, math.inf
        return 1e6 * found / events, 1e6 * upper_bound(found) / events


def upper_bound(found: int) -> float:
    """The mean of a Poisson distribution by which `found` and fewer come with 5 %: 3 for none, the rule of three."""
    low, high = 0.0, 10.0 + 3.0 * found
    for _ in range(60):
        mean = (low + high) / 2
        term = total = math.exp(-mean)
        for count in range(1, found + 1):
            term *= mean / count
            total += term
        low, high = (mean, high) if total > 0.05 else (low, mean)
    return high


def read(folder: Path) -> list[Event]:
    """Every event of every process, in the order of time, and of its process. A torn last line is passed over."""
    events = [event for path in sorted(folder.glob("*.jsonl")) for event in read_file(path)]
    return sorted(events, key=lambda event: (event.time_ns, event.process, event.number))


def read_file(path: Path) -> Iterator[Event]:
    with path.open() as lines:
        for line in lines:
            try:
                fields = json.loads(line)
            except ValueError:
                continue
            yield Event(path.stem, fields.pop("n"), fields.pop("t"), fields.pop("e"), fields)


@dataclass
class ChangeLog:
    """The change log, put together from what the processes learned of it."""

    entries: dict[int, Event] = field(default_factory=dict)
    """By sequence, as whoever came first recorded it."""
    committed: dict[str, int] = field(default_factory=dict)
    """Root -> when the log took its first valid commit, in ns."""
    moves: dict[str, list[tuple[int, str | None]]] = field(default_factory=lambda: defaultdict(list))
    """Ref -> (when, root) of each of its moves."""

    @classmethod
    def of(cls, events: Iterable[Event]) -> ChangeLog:
        log = cls()
        for event in events:
            if event.kind == "log":
                log.entries.setdefault(event.seq, event)
        aborted: set[str] = set()
        for _, entry in sorted(log.entries.items()):
            kind = entry.fields["kind"]
            if kind == "abort":
                aborted.add(entry.tx)
            elif kind == "commit" and entry.tx not in aborted:
                log.committed.setdefault(entry.root, entry.at)
            elif kind == "ref" and (entry.root is None or (entry.now and entry.root in log.committed)):
                log.moves[entry.ref].append((entry.at, entry.root))
        return log

    def named(self, ref: str, time_ns: int, fresh_ns: int, skew_ns: int) -> set[str]:
        """The roots that the ref named at some time from `fresh_ns` before that moment on."""
        moves = self.moves.get(ref, [])
        found = set()
        for at, (since_ns, root) in enumerate(moves):
            until_ns = moves[at + 1][0] if at + 1 < len(moves) else math.inf
            if root and since_ns - skew_ns <= time_ns <= until_ns + fresh_ns + skew_ns:
                found.add(root)
        return found
