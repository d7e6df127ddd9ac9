"""A picture for each curve."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from loadtest.grow.curves import Curve


def plot(curves: Sequence[Curve], folder: Path) -> list[Path]:
    """Writes one PNG a curve: the median as a line, every sample as a dot, and linear growth as a dashed line."""
    return [_plot(curve, folder / f"{curve.name}.png") for curve in curves if curve.samples]


def _plot(curve: Curve, path: Path) -> Path:
    figure = Figure(figsize=(5.6, 3.6), dpi=120, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    xs, ys = zip(*curve.points, strict=True)
    dots = [(x, y) for x, values in curve.samples.items() for y in values]
    axes.scatter([x for x, _ in dots], [y for _, y in dots], s=12, alpha=0.4)
    axes.plot(xs, ys, marker="o", label="median")
    axes.plot(xs, [ys[0] * x / xs[0] for x in xs], linestyle="--", color="grey", label="in proportion to the first")
    growth = "" if math.isnan(curve.exponent) else f" ~ x^{curve.exponent:.2f}"
    axes.set(xlabel=curve.x_label, ylabel=curve.y_label, title=f"{curve.name.replace('-', ' ')}{growth}")
    axes.set_xlim(left=0, right=1.05 * xs[-1])
    axes.set_ylim(bottom=0, top=1.3 * max(y for _, y in dots))
    axes.set_xticks(_apart(xs))
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(path)
    return path


def _apart(xs: Sequence[int]) -> list[int]:
    """What was measured, as far as labels have room: a twelfth of the axis each."""
    kept: list[int] = []
    for x in reversed(xs):
        if not kept or kept[-1] - x >= xs[-1] / 12:
            kept.append(x)
    return kept
