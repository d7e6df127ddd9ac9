"""Rows of several versions of a model in one step: neighbours that share some weights go through them together."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

import torch
from torch import Tensor

W = TypeVar("W")


def over(rows: Sequence[int], weights: Sequence[W], work: Callable[[W, slice], Tensor]) -> Tensor:
    """What `work` makes of the rows of each version, one after the other: `rows` of them, with these `weights`.

    Versions that share weights have the same object."""
    runs: list[tuple[W, slice]] = []
    start = 0
    for count, own in zip(rows, weights, strict=True):
        if runs and runs[-1][0] is own:
            runs[-1] = own, slice(runs[-1][1].start, start + count)
        else:
            runs.append((own, slice(start, start + count)))
        start += count
    parts = [work(own, where) for own, where in runs]
    return parts[0] if len(parts) == 1 else torch.cat(parts)
