"""A picture for each curve."""

from __future__ import annotations

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
    axes.scatter(*zip(*dots, strict=True), s=12, alpha=0.4)
    axes.plot(xs, ys, marker="o", label="median")
    axes.plot(xs, [ys[0] * x / xs[0] for x in xs], linestyle="--", color="grey", label="linear")
    axes.set(xlabel=curve.x_label, ylabel=curve.y_label, title=curve.name)
    axes.set_ylim(bottom=0, top=1.3 * max(y for _, y in dots))
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(path)
    return path
