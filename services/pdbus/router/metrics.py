"""What the router counts, beside the measures of OpenTelemetry's conventions for generative AI."""

from __future__ import annotations

from typing import Literal

from pdbus.router.placement import Pair
from pdbus.telemetry import EdgeMetrics, meter

Lookup = Literal["hit", "miss", "bypass"]
Dropped = Literal["attempt", "root", "no_request"]


class RouterMetrics:
    def __init__(self, model: str) -> None:
        self.edge = EdgeMetrics(model)
        self._attempts = meter().create_counter("pdbus.router.attempts", "{attempt}", "Attempts by outcome")
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
        self._results = meter().create_counter("pdbus.router.result_cache", "{lookup}", "Result cache by outcome")
        self.dropped_items = 0

    def attempt(self, outcome: str) -> None:
        self._attempts.add(1, {"outcome": outcome})

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
        self._results.add(1, {"outcome": outcome})
