"""What callers give as tensors, as fp32 arrays. Torch tensors are taken without torch being imported here."""

from __future__ import annotations

from typing import Any

import numpy as np

from pdbus.errors import InvalidRequest
from pdbus.weights.blocks import Array


def as_fp32(name: str, value: Any) -> Array:
    """`value` (numpy, torch, or anything that numpy takes) in fp32; fp16 and bf16 are widened, which is exact.

    No copy where it is fp32 in C order already. Raises InvalidRequest for other kinds and for what isn't finite."""
    if hasattr(value, "detach"):  # a torch tensor: numpy knows no bf16, and none on another device
        value = value.detach().float().cpu().numpy()
    # plain numbers are rounded; an array that is wider says something that would be lost
    array = np.asarray(value) if hasattr(value, "dtype") else np.asarray(value, np.float32)
    if array.dtype.kind != "f" or array.dtype.itemsize > 4:
        raise InvalidRequest(f"{name} is of {array.dtype}: weights are taken in float32 or narrower", param=name)
    array = np.ascontiguousarray(array, "<f4").reshape(array.shape)
    if not np.isfinite(array).all():
        raise InvalidRequest(f"{name} holds values that are not finite", param=name)
    return array


def as_factors(name: str, a: Any, b: Any, shape: tuple[int, ...]) -> tuple[Array, Array]:
    """Factors a [rows, rank] and b [rank, columns] of a matrix of that shape. Raises as `as_fp32`; also for others."""
    left, right = as_fp32(name, a), as_fp32(name, b)
    if left.ndim != 2 or right.ndim != 2 or (left.shape[0], right.shape[1]) != shape or left.shape[1] != right.shape[0]:
        raise InvalidRequest(f"{left.shape} @ {right.shape} does not fit {name}, {shape}", param=name)
    return left, right


def as_ids(name: str, value: Any, below: int) -> Array:
    """Indices from 0 to `below` - 1, each once. Raises InvalidRequest."""
    ids = np.asarray(value)
    if ids.ndim != 1 or ids.dtype.kind not in "iu":
        raise InvalidRequest(f"{name}: indices are a list of integers", param=name)
    ids = ids.astype(np.int64)
    if len(ids) and (ids.min() < 0 or ids.max() >= below):
        raise InvalidRequest(f"{name}: indices are 0 to {below - 1}", param=name)
    if len(np.unique(ids)) != len(ids):
        raise InvalidRequest(f"{name}: an index comes twice", param=name)
    return ids
