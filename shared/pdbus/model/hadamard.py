"""Orthogonal mixing of any even size by matrices of +1 and -1, in a fixed order of additions (no BLAS)."""

from __future__ import annotations

from functools import lru_cache
from typing import Any, TypeAlias

import numpy as np

Array: TypeAlias = "np.ndarray[Any, Any]"

_LARGEST_ODD_ORDER = 260


def rotate(x: Array) -> Array:
    """x H / sqrt(order) for float64 x [rows, size], H = K x (Sylvester's 2^k).

    K is a Hadamard matrix by Paley's constructions where size = order of K times 2^k; else H mixes runs of the largest
    power of two in size only, which is orthogonal all the same."""
    rows, size = x.shape
    order = _core_order(size)
    parts = size // order if order else size & -size
    y = x.reshape(rows, -1, parts)  # [rows, order of K or number of runs, 2^k]
    half = 1
    while half < parts:
        pairs = y.reshape(rows, -1, 2, half)
        y = np.stack((pairs[:, :, 0] + pairs[:, :, 1], pairs[:, :, 0] - pairs[:, :, 1]), 2)
        half *= 2
    y = y.reshape(rows, -1, parts)
    if order > 1:
        core = _core(order)
        mixed = y[:, :1] * core[0][:, None]
        for index in range(1, order):
            mixed += y[:, index : index + 1] * core[index][:, None]
        y = mixed
    scale: Array = y.reshape(rows, size) / np.sqrt(np.float64(parts * max(order, 1)))
    return scale


def _core_order(size: int) -> int:
    """The smallest order of a Paley matrix (or 1) that leaves a power of two; 0: there is none."""
    order = size // (size & -size)
    if order == 1:
        return 1
    while order <= min(size, _LARGEST_ODD_ORDER):
        if order % 4 == 0 and (_is_prime(order - 1) or (order % 8 == 4 and _is_prime(order // 2 - 1))):
            return order
        order *= 2
    return 0


def _is_prime(number: int) -> bool:
    return number > 2 and all(number % factor for factor in range(2, int(number**0.5) + 1))


@lru_cache(maxsize=8)
def _core(order: int) -> Array:
    """Paley's Hadamard matrix of this order: construction I from the prime order - 1, else II from order / 2 - 1."""
    if _is_prime(order - 1):
        skew = _bordered(order - 1, -1.0)
        return np.eye(order) + skew
    symmetric = _bordered(order // 2 - 1, 1.0)
    return np.kron(symmetric, [[1.0, 1.0], [1.0, -1.0]]) + np.kron(np.eye(order // 2), [[1.0, -1.0], [-1.0, -1.0]])


def _bordered(prime: int, left: float) -> Array:
    """The matrix of quadratic residues of differences modulo `prime`, with a border of ones."""
    squares = {value * value % prime for value in range(1, prime)}
    residue = np.array([0.0] + [1.0 if value in squares else -1.0 for value in range(1, prime)])
    index = np.arange(prime)
    matrix = np.zeros((prime + 1, prime + 1))
    matrix[0, 1:], matrix[1:, 0] = 1.0, left
    matrix[1:, 1:] = residue[(index[:, None] - index) % prime]
    return matrix
