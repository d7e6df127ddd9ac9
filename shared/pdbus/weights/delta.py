"""What travels of a changed block: all of it, the elements that differ, or a low-rank product to add.

A delta is exact: it is applied to a copy of the very base that it was made from, and what comes out counts only if its
digest is the one wanted; whoever applies it checks both. Elements are compared and set as bits, never as numbers.

    sparse    magic 4 | element bytes u8 | gap bytes u8 | count u32 | gaps | values      little-endian
    low rank  magic 4 | rows u32 | columns u32 | rank u32 | A [rows, rank] | B [rank, columns], both fp32

A gap is an element's distance from the one before it, less one; that of the first is its index.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, Literal, TypeAlias

import numpy as np
import numpy.typing as npt

from pdbus.buffer import Buffer
from pdbus.errors import Corrupt

Form: TypeAlias = Literal["whole", "sparse", "low_rank"]
Floats: TypeAlias = npt.NDArray[np.float32]

_SPARSE, _LOW_RANK = b"pds1", b"pdl1"
_SPARSE_HEAD, _LOW_RANK_HEAD = struct.Struct("<4sBBI"), struct.Struct("<4sIII")
_UNSIGNED: Mapping[int, np.dtype[Any]] = MappingProxyType({n: np.dtype(f"<u{n}") for n in (1, 2, 4)})


def sparse(base: Buffer, target: Buffer, element_bytes: int) -> bytes | None:
    """The elements of `target` that differ from `base`; None where that is no smaller than `target`.

    `element_bytes`: 1, 2 or 4. Raises ValueError where the two differ in size."""
    if len(base) != len(target):
        raise ValueError(f"a base of {len(base)} bytes for a block of {len(target)}")
    kind = _UNSIGNED[element_bytes]
    new = np.frombuffer(target, kind)
    changed = np.flatnonzero(np.frombuffer(base, kind) != new)
    gaps = np.diff(changed, prepend=-1) - 1
    gap_bytes = next(width for width in (1, 2, 4) if gaps.max(initial=0) < 1 << 8 * width)
    if _SPARSE_HEAD.size + len(changed) * (gap_bytes + element_bytes) >= len(target):
        return None
    head = _SPARSE_HEAD.pack(_SPARSE, element_bytes, gap_bytes, len(changed))
    return head + gaps.astype(_UNSIGNED[gap_bytes]).tobytes() + new[changed].tobytes()


def low_rank(a: Floats, b: Floats) -> bytes:
    """A [rows, rank] and B [rank, columns], whose product is added to the rows of one block."""
    (rows, rank), columns = a.shape, b.shape[1]
    factors = (np.ascontiguousarray(part, "<f4").tobytes() for part in (a, b))
    return _LOW_RANK_HEAD.pack(_LOW_RANK, rows, columns, rank) + b"".join(factors)


def plus_product(base: Floats, a: Floats, b: Floats) -> Floats:
    """base [rows, columns] + a @ b, as both ends compute it: block by block, since the sums' order depends on it."""
    return base + a @ b


def applied(form: Form, base: Buffer, body: Buffer) -> bytes:
    """The block that a delta of that form makes of `base`. Raises Corrupt where it can't be a delta of it."""
    if form == "whole":
        return bytes(body)
    apply: Callable[[Buffer, memoryview], bytes] = _apply_sparse if form == "sparse" else _apply_low_rank
    return apply(base, memoryview(body).cast("B"))


def _apply_sparse(base: Buffer, body: memoryview) -> bytes:
    magic, element_bytes, gap_bytes, count = _head(_SPARSE_HEAD, body)
    if magic != _SPARSE or element_bytes not in _UNSIGNED or gap_bytes not in _UNSIGNED or len(base) % element_bytes:
        raise Corrupt("a sparse delta can't be read")
    values_at = _SPARSE_HEAD.size + count * gap_bytes
    if len(body) != values_at + count * element_bytes:
        raise Corrupt("a sparse delta is not as long as it says")
    gaps = np.frombuffer(body[_SPARSE_HEAD.size : values_at], _UNSIGNED[gap_bytes])
    at = np.cumsum(gaps.astype(np.int64) + 1) - 1
    block = np.frombuffer(base, _UNSIGNED[element_bytes]).copy()
    if count and at[-1] >= len(block):
        raise Corrupt("a sparse delta reaches beyond its block")
    block[at] = np.frombuffer(body[values_at:], _UNSIGNED[element_bytes])
    return block.tobytes()


def _apply_low_rank(base: Buffer, body: memoryview) -> bytes:
    magic, rows, columns, rank = _head(_LOW_RANK_HEAD, body)
    a_bytes, b_bytes = 4 * rows * rank, 4 * rank * columns
    if magic != _LOW_RANK or len(body) != _LOW_RANK_HEAD.size + a_bytes + b_bytes or len(base) != 4 * rows * columns:
        raise Corrupt("a low-rank delta does not fit its block")
    factors = np.frombuffer(body[_LOW_RANK_HEAD.size :], "<f4")
    a, b = factors[: rows * rank].reshape(rows, rank), factors[rows * rank :].reshape(rank, columns)
    return plus_product(np.frombuffer(base, "<f4").reshape(rows, columns), a, b).astype("<f4").tobytes()


def _head(form: struct.Struct, body: memoryview) -> tuple[Any, ...]:
    if len(body) < form.size:
        raise Corrupt("a delta has no head")
    return form.unpack_from(body)
