"""Verifies G1 to G6 of DESIGN.md on what the processes of a run recorded, in one pass.

Times are of one machine's wall clock. What a guarantee says of a moment is judged in favour of the system by SKEW_S, so
that what is told here did happen. Nothing is trusted for its label alone: see watermark.py for that.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable

from loadtest.checker.records import ChangeLog, Event, Verdict, Violation

SKEW_S = 0.05
FRESH_S = 5.0
"""How long after a ref entry a request may still be admitted on the ref's older root (G3)."""


def verify(events: Iterable[Event], *, fresh_s: float = FRESH_S, skew_s: float = SKEW_S) -> Verdict:
    """One pass over all events (in the order of `read`), after one over those of the change log."""
    events = list(events)
    verdict = Verdict()
    log = ChangeLog.of(events)
    judges = (_OneRoot(), _Whole(log, skew_s), _Fresh(log, fresh_s, skew_s), _Made(), _Fenced(), _Gapless(log))
    for judge in judges:
        verdict.events[judge.guarantee] += 0
    for event in events:
        for judge in judges:
            if event.kind in judge.kinds:
                verdict.events[judge.guarantee] += 1
                verdict.violations += judge.hear(event)
    for judge in judges:
        verdict.violations += judge.end()
    return verdict


class _Judge:
    """Hears the events of its kinds, in order."""

    guarantee: str
    kinds: frozenset[str]

    def hear(self, event: Event) -> list[Violation]:
        raise NotImplementedError

    def end(self) -> list[Violation]:
        return []

    def _found(self, what: str, *evidence: Event) -> list[Violation]:
        return [Violation(self.guarantee, what, evidence)]


class _OneRoot(_Judge):
    """Router, prefill, hand-over, decode and every token of a request speak of one root."""

    guarantee = "G1"
    kinds = frozenset({"admit", "pin", "handoff", "computed", "token", "hit", "end"})

    def __init__(self) -> None:
        self._first: dict[str, Event] = {}

    def hear(self, event: Event) -> list[Violation]:
        request = event.request or event.session.rsplit("-", 1)[0]
        first = self._first.setdefault(request, event)
        if event.root == first.root and event.fields.get("made", event.root) == event.root:
            return []
        return self._found(f"request {request} met two roots", first, event)


class _Whole(_Judge):
    """Nothing is admitted, loaded or named on a root before its commit is in the log."""

    guarantee = "G2"
    kinds = frozenset({"admit", "pin", "loaded", "computed"})

    def __init__(self, log: ChangeLog, skew_s: float) -> None:
        self._log, self._skew_ns = log, int(skew_s * 1e9)

    def hear(self, event: Event) -> list[Violation]:
        since_ns = self._log.committed.get(event.root, math.inf)
        if event.time_ns + self._skew_ns >= since_ns:
            return []
        when = "was never" if since_ns == math.inf else "was not yet"
        return self._found(f"root {event.root} {when} committed", event)


class _Fresh(_Judge):
    """Whoever is admitted by a ref gets what it names, or named a moment ago."""

    guarantee = "G3"
    kinds = frozenset({"admit"})

    def __init__(self, log: ChangeLog, fresh_s: float, skew_s: float) -> None:
        self._log, self._fresh_ns, self._skew_ns = log, int(fresh_s * 1e9), int(skew_s * 1e9)

    def hear(self, event: Event) -> list[Violation]:
        if event.ref is None:
            return []
        named = self._log.named(event.ref, event.time_ns, self._fresh_ns, self._skew_ns)
        if event.root in named:
            return []
        told = ", ".join(sorted(named)) or "nothing"
        return self._found(f"admitted by {event.ref} on {event.root}, when it named {told}", event)


class _Made(_Judge):
    """What a cache gives was made from the reader's weights; a page of KV, from the same KV-relevant ones."""

    guarantee = "G4"
    kinds = frozenset({"loaded", "put", "get", "hit"})

    def __init__(self) -> None:
        self._kv_root: dict[str, str] = {}
        self._puts: dict[str, Event] = {}

    def hear(self, event: Event) -> list[Violation]:
        if event.kind == "loaded":
            if event.kv_root:
                self._kv_root[event.root] = event.kv_root
        elif event.kind == "put":
            return self._put(event)
        elif event.name:
            return []  # fences itself by its own version: G5
        elif event.kind == "get" and event.fields["kind"] == "kv":
            return self._read_kv(event)
        elif event.made != event.root:
            return self._found("an entry made from another root was given", event)
        return []

    def _put(self, event: Event) -> list[Violation]:
        if event.fields["kind"] != "kv":
            return []
        other = self._puts.setdefault(event.key, event)
        if self._alike(other.made, event.made):
            return []
        return self._found("two roots with different KV share the key of a page", other, event)

    def _read_kv(self, event: Event) -> list[Violation]:
        put = self._puts.get(event.key)
        if put is None or self._alike(put.made, event.root):
            return []
        return self._found("a page was read that was made from other weights", put, event)

    def _alike(self, one: str, other: str) -> bool:
        ours, theirs = self._kv_root.get(one), self._kv_root.get(other)
        return one == other or ours is None or theirs is None or ours == theirs


class _Fenced(_Judge):
    """On a cache node, nothing of a deleted root or name is stored or given until it is let in again."""

    guarantee = "G5"
    kinds = frozenset({"put", "get", "delete", "restore", "delete_name", "forget_all", "start"})

    def __init__(self) -> None:
        self._buried: dict[tuple[str, str], Event] = {}
        self._names: dict[tuple[str, str], Event] = {}
        self._stored: dict[tuple[str, str], Event] = {}

    def hear(self, event: Event) -> list[Violation]:
        node = event.process
        if event.kind == "delete":
            self._buried[node, event.root] = event
        elif event.kind == "restore":
            self._buried.pop((node, event.root), None)
        elif event.kind == "delete_name":
            self._names[node, event.name] = event
        elif event.kind == "forget_all":
            for known in (self._buried, self._names, self._stored):
                for key in [key for key in known if key[0] == node]:
                    del known[key]
        elif event.kind in ("put", "get"):
            return self._named(event) if event.name else self._keyed(event)
        return []

    def _keyed(self, event: Event) -> list[Violation]:
        deleted = self._buried.get((event.process, event.made))
        return self._found(f"{event.kind} of an entry whose root was deleted", deleted, event) if deleted else []

    def _named(self, event: Event) -> list[Violation]:
        deleted = self._names.get((event.process, event.name))
        if event.kind == "put":
            self._stored[event.process, event.key] = event
            if deleted and event.generation < deleted.generation:
                return self._found("a fill from before its name was deleted", deleted, event)
        elif deleted:
            stored = self._stored.get((event.process, event.key))
            if stored is None or stored.number < deleted.number:
                return self._found("an entry survived the delete of its name", deleted, event)
        return []


class _Gapless(_Judge):
    """Each process learns every entry of the change log in order; each answer's tokens come once, in order, whole."""

    guarantee = "G6"
    kinds = frozenset({"log", "token", "end"})

    def __init__(self, log: ChangeLog) -> None:
        order = sorted(log.entries)
        self._after = dict(itertools.pairwise(order))
        self._last: dict[str, Event] = {}
        self._told: dict[str, int] = {}

    def hear(self, event: Event) -> list[Violation]:
        if event.kind == "log":
            last = self._last.get(event.process)
            self._last[event.process] = event
            if last is not None and self._after.get(last.seq) != event.seq:
                return self._found(f"entry {self._after.get(last.seq)} of the change log was passed over", last, event)
        elif event.kind == "token":
            expected = self._told.get(event.session, 0)
            self._told[event.session] = event.index + event.count
            if event.index != expected:
                return self._found(f"token {event.index} was told where {expected} was due", event)
        elif event.whole:
            told = [self._told.pop(name) for name in self._sessions(event.request)]
            if told and sum(told) < event.tokens:  # more: what followed a stop string
                return self._found(f"an answer of {event.tokens} tokens, of which {sum(told)} were told", event)
        return []

    def _sessions(self, request: str) -> list[str]:
        """Choices are numbered from 0 on; those of an answer from the cache have no tokens of their own."""
        found: list[str] = []
        while (name := f"{request}-{len(found)}") in self._told:
            found.append(name)
        return found
