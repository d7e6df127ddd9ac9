"""Linear layers behind one small interface, so that a precision is chosen where a layer is built and nowhere else."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor


class Linear(Protocol):
    """x [tokens, in_features] -> [tokens, out_features]."""

    def __call__(self, x: Tensor) -> Tensor: ...


class Fp32Linear:
    """Exact: weight [out_features, in_features] and bias [out_features] as the checkpoint has them."""

    def __init__(self, weight: Tensor, bias: Tensor | None = None) -> None:
        self._weight, self._bias = weight, bias

    def __call__(self, x: Tensor) -> Tensor:
        return F.linear(x, self._weight, self._bias)


def fused(weights: Sequence[Tensor], biases: Sequence[Tensor]) -> Linear:
    """Several linears over the same input as one: their outputs side by side. `biases`: one for each, or none."""
    return Fp32Linear(torch.cat(list(weights)), torch.cat(list(biases)) if biases else None)
