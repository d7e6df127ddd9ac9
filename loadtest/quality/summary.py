"""From readings to figures, and from figures to a table. Pure."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from loadtest.markdown import markdown
from loadtest.quality.measure import Reading

LIMIT = 0.01
"""How much worse than fp32 the default precision's perplexity may be."""
DEFAULT = ("int8", "int8")
"""Weights and KV of `auto` where the native engine serves."""


@dataclass(frozen=True)
class Quality:
    precision: str
    kv_dtype: str
    perplexity: float
    change: float
    """Of perplexity against the first reading: 0.01 is one percent worse."""
    error: float
    """Standard error of `change`, by the spread of the tokens' differences."""
    same: float
    """Share of positions whose best token is that of the first reading."""

    @property
    def is_default(self) -> bool:
        return (self.precision, self.kv_dtype) == DEFAULT


def quality(reading: Reading, reference: Reading) -> Quality:
    """Of one reading against that of the reference, on the same texts."""
    difference = reading.losses - reference.losses
    return Quality(
        reading.precision,
        reading.kv_dtype,
        perplexity=float(np.exp(reading.losses.mean())),
        change=float(np.expm1(difference.mean())),
        error=float(difference.std() / math.sqrt(len(difference))),
        same=float((reading.best == reference.best).mean()),
    )


def render(rows: Sequence[Quality]) -> str:
    head = ["weights", "KV", "perplexity", "against fp32", "± (1 σ)", "same top-1"]
    return markdown(head, [_cells(row) for row in rows])


def verdict(rows: Sequence[Quality]) -> tuple[str, bool]:
    """A line on the default precision, and whether it may be that."""
    for row in rows:
        if row.is_default:
            keeps = row.change <= LIMIT
            said = "within" if keeps else "NOT within"
            return f"the default, {row.precision} with KV in {row.kv_dtype}: {said} {LIMIT:.0%} of fp32", keeps
    return "the default precision was not measured", True


def _cells(row: Quality) -> list[str]:
    name = f"{row.precision} (default)" if row.is_default else row.precision
    return [name, row.kv_dtype, f"{row.perplexity:.3f}", f"{row.change:+.2%}", f"{row.error:.2%}", f"{row.same:.1%}"]
