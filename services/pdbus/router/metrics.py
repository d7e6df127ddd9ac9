"""What the router counts, beside the measures of OpenTelemetry's conventions for generative AI."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Literal

from opentelemetry.context import Context
from opentelemetry.trace import Span, SpanKind

from pdbus.router.placement import Pair
from pdbus.router.ref_stats import RefStatistics
from pdbus.telemetry import Attributes, EdgeMetrics, Tally, meter, span, tracer

Lookup = Literal["hit", "miss", "bypass"]
Dropped = Literal["attempt", "root", "no_request"]


class RouterMetrics:
    """Also makes the router's spans."""

    def __init__(self, model: str, router: str = "") -> None:
        self._tracer = tracer()
        self.edge = EdgeMetrics(model)
        self.refs = RefStatistics(router)
        self._attempts = Tally("pdbus.router.attempts", "{attempt}", "Attempts by outcome", "outcome")
        self._placements = meter().create_counter(
            "pdbus.router.placements", "{attempt}", "Attempts by who reads the prompt: the decode worker, or another"
        )
        self._matched = meter().create_counter(
            "pdbus.router.matched_tokens", "{token}", "Prompt tokens that the worker chosen to read them has cached"
        )
        self._dropped = meter().create_counter(
            "pdbus.router.items_dropped", "{item}", "Token items of another attempt or root, or of no request"
        )
        self._gaps = meter().create_counter("pdbus.router.frame_gaps", "{gap}", "Gaps in the numbers of token frames")
        self._resends = meter().create_counter("pdbus.router.resends", "{request}", "Requests for a resend")
        self._results = Tally("pdbus.router.result_cache", "{lookup}", "Result cache by outcome", "outcome")
        self.dropped_items = 0

    def span(
        self,
        name: str,
        attributes: Attributes | None = None,
        *,
        kind: SpanKind = SpanKind.INTERNAL,
        parent: Context | None = None,
        record_exception: bool = True,
    ) -> AbstractContextManager[Span]:
        """The current span of a scope; nothing where spans go nowhere. `parent`: the caller's trace."""
        return span(
            self._tracer, name, context=parent, kind=kind, attributes=attributes, record_exception=record_exception
        )

    def attempt(self, outcome: str) -> None:
        self._attempts.add(outcome)

    def placed(self, pair: Pair) -> None:
        kind = {"kind": "local" if pair.prefill is None else "remote"}
        self._placements.add(1, kind)
        self._matched.add(pair.matched_tokens, kind)

    def dropped(self, reason: Dropped) -> None:
        self.dropped_items += 1
        self._dropped.add(1, {"reason": reason})

    def gap(self) -> None:
        self._gaps.add(1)

    def resend(self) -> None:
        self._resends.add(1)

    def result_cache(self, outcome: Lookup) -> None:
        self._results.add(outcome)
