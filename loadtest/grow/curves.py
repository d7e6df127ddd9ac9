"""A curve: what was measured at each point, and whether it grows faster than the work does. Pure."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from statistics import median
from typing import Any


@dataclass
class Curve:
    """Samples by the quantity that was varied."""

    name: str
    x_label: str
    y_label: str
    samples: dict[int, list[float]] = field(default_factory=dict)

    def add(self, x: int, y: float) -> None:
        self.samples.setdefault(x, []).append(y)

    @property
    def points(self) -> list[tuple[int, float]]:
        """(x, median), ascending."""
        return [(x, median(values)) for x, values in sorted(self.samples.items())]

    @property
    def exponent(self) -> float:
        """p of the best fit y ~ x^p (least squares on logarithms); NaN where there is too little to fit.

        1 is linear; what stands beside the growing part (a fixed cost) makes it smaller."""
        points = [(math.log(x), math.log(y)) for x, y in self.points if x > 0 and y > 0]
        if len(points) < 2:
            return math.nan
        mean_x, mean_y = (sum(values) / len(points) for values in zip(*points, strict=True))
        spread = sum((x - mean_x) ** 2 for x, _ in points)
        return sum((x - mean_x) * (y - mean_y) for x, y in points) / spread if spread else math.nan

    def as_json(self) -> dict[str, Any]:
        exponent = self.exponent
        return asdict(self) | {"points": self.points, "exponent": None if math.isnan(exponent) else exponent}


def render(curves: Sequence[Curve]) -> str:
    """A block of numbers for each curve."""
    blocks = []
    for curve in curves:
        points = "\n".join(f"  {x:>6} {y:10.4g}" for x, y in curve.points)
        blocks.append(f"{curve.name}: {curve.y_label} by {curve.x_label} (exponent {curve.exponent:.2f})\n{points}")
    return "\n\n".join(blocks)
