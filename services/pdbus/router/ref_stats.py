"""What the requests of each ref meet: by these one decides whether a canary becomes stable or goes."""

from __future__ import annotations

import time
from collections import OrderedDict, deque
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from opentelemetry.metrics import CallbackOptions, Observation

from pdbus.context import RequestContext
from pdbus.messages.common import Digest
from pdbus.messages.router import RefFigures, RefStats, RefStatsWanted
from pdbus.telemetry import meter

if TYPE_CHECKING:
    from pdbus.router.answer import Answer

PINNED = "(version)"
"""Of requests that name a root."""
OTHERS = "(others)"
_MOST_REFS = 16
"""Under a name of their own in metrics."""
_SAMPLES = 1000
"""Of latencies, the latest ones, for each version of a ref."""
_SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0)


@dataclass(slots=True)
class _Counts:
    requests: int = 0
    errors: int = 0
    first_token_s: deque[float] = field(default_factory=lambda: deque(maxlen=_SAMPLES))
    per_token_s: deque[float] = field(default_factory=lambda: deque(maxlen=_SAMPLES))


@dataclass(slots=True)
class Served:
    """One request of a ref. `root` and `answer` are set when they are known."""

    root: Digest = b""
    answer: Answer | None = None


class RefStatistics:
    """Counts requests, errors and latencies by ref, in metrics and for whoever asks over the bus.

    An error is whatever keeps a caller from its answer; that a caller leaves is none. Answers out of the result cache
    count as requests, and not among the latencies."""

    def __init__(self, router: str) -> None:
        self._router = router
        self._counts: OrderedDict[tuple[str, Digest], _Counts] = OrderedDict()
        self._totals: dict[tuple[str, str], int] = {}
        """(ref, outcome) -> requests."""
        self._names: set[str] = set()
        meter().create_observable_counter(
            "pdbus.router.ref.requests", [self._read], "{request}", "Requests by the ref that they were admitted by"
        )
        self._first = meter().create_histogram(
            "pdbus.router.ref.time_to_first_token", "s", explicit_bucket_boundaries_advisory=_SECONDS
        )
        self._per_token = meter().create_histogram(
            "pdbus.router.ref.time_per_output_token", "s", explicit_bucket_boundaries_advisory=_SECONDS
        )

    @contextmanager
    def request(self, ref: str | None) -> Iterator[Served]:
        """The scope of one request. `ref`: the name that it is admitted by; None: it names a root."""
        served, began_s, name = Served(), time.monotonic(), self._bounded(ref)
        try:
            yield served
        except Exception:
            self._count(name, served.root, "error")
            raise
        except BaseException:  # the caller has gone
            self._total(name, "cancelled")
            raise
        answer = served.answer
        if answer is None or answer.failed:
            self._count(name, served.root, "error")
        elif not answer.whole:
            self._total(name, "cancelled")
        else:
            self._count(name, served.root, "answered")
            if answer.source != "hit" and answer.first_s is not None:
                self._latencies(name, served.root, answer, began_s)

    async def tell(self, wanted: RefStatsWanted, ctx: RequestContext) -> RefStats:
        """Answers REF_STATS."""
        return RefStats(
            self._router,
            tuple(
                RefFigures(ref, root, one.requests, one.errors, tuple(one.first_token_s), tuple(one.per_token_s))
                for (ref, root), one in self._counts.items()
            ),
        )

    def _latencies(self, name: str, root: Digest, answer: Answer, began_s: float) -> None:
        assert answer.first_s is not None
        counts, now_s = self._counts[name, root], time.monotonic()
        first_s = answer.first_s - began_s
        counts.first_token_s.append(first_s)
        self._first.record(first_s, {"pdbus.ref": name})
        longest = max((len(output.ids) for output in answer.outputs), default=0)
        if longest > 1:
            per_token_s = (now_s - answer.first_s) / (longest - 1)
            counts.per_token_s.append(per_token_s)
            self._per_token.record(per_token_s, {"pdbus.ref": name})

    def _count(self, name: str, root: Digest, outcome: str) -> None:
        self._total(name, outcome)
        counts = self._counts.setdefault((name, root), _Counts())
        self._counts.move_to_end((name, root))
        counts.requests += 1
        counts.errors += outcome == "error"
        if len(self._counts) > _MOST_REFS:
            self._counts.popitem(last=False)

    def _total(self, name: str, outcome: str) -> None:
        self._totals[name, outcome] = self._totals.get((name, outcome), 0) + 1

    def _bounded(self, ref: str | None) -> str:
        if ref is None:
            return PINNED
        if ref not in self._names and len(self._names) >= _MOST_REFS:
            return OTHERS
        self._names.add(ref)
        return ref

    def _read(self, _: CallbackOptions) -> list[Observation]:
        """Possibly in another thread, so from a copy."""
        totals = tuple(self._totals.items())
        return [Observation(count, {"pdbus.ref": ref, "outcome": outcome}) for (ref, outcome), count in totals]
