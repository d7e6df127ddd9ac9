"""How a tensor is cut into blocks, and which virtual shard a block belongs to.

The rule is exact, so that any pusher makes the same digests: from row 0 on, runs of
`max(1, 262144 // row bytes)` rows of the checkpoint's own (unfused) tensor, each in little-endian C order. A row is
one index of the first dimension; a tensor without dimensions is one row. An empty tensor has no blocks.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from pdbus import canonical

BLOCK_BYTES = 262_144
SHARDS = 64

Array: TypeAlias = npt.NDArray[Any]

DTYPES: Mapping[str, np.dtype[Any]] = MappingProxyType({"fp32": np.dtype("<f4"), "u8": np.dtype("u1")})
"""The element types of weights and files as they are pushed, as bytes of a block spell them."""

GROUP = 32
"""Elements of an int8 row that share a scale."""

PACKED_ROW_BYTES: Mapping[str, Callable[[int], int]] = MappingProxyType(
    {
        "fp16": lambda elements: 2 * elements,
        "bf16": lambda elements: 2 * elements,
        "fp8": lambda elements: elements + 4,
        "int8": lambda elements: elements + 2 * (elements // GROUP),
    }
)
"""Bytes of a row of so many elements in the forms that a version in another precision has (weights/packed.py)."""


@dataclass(frozen=True, slots=True)
class Run:
    """Some rows of a tensor, which begin and end as blocks do."""

    tensor: str
    rows: slice
    """Start and stop."""


def dtype_name(dtype: np.dtype[Any]) -> str:
    """The manifest's name of `dtype`. Raises ValueError for one that no manifest can hold."""
    for name, known in DTYPES.items():
        if known == dtype:
            return name
    raise ValueError(f"{dtype} is not a dtype of weight blocks ({', '.join(DTYPES)})")


def is_dtype(name: str, shape: Sequence[int]) -> bool:
    """Whether a tensor of that shape may have the dtype `name`."""
    if name in PACKED_ROW_BYTES:
        return len(shape) > 0 and (name != "int8" or math.prod(shape[1:]) % GROUP == 0)
    return name in DTYPES


def tensor_bytes(shape: Sequence[int], dtype: str) -> int:
    return (shape[0] if shape else 1) * row_bytes(shape, dtype)


def rows_per_block(shape: Sequence[int], dtype: str) -> int:
    return max(1, BLOCK_BYTES // max(1, row_bytes(shape, dtype)))


def block_count(shape: Sequence[int], dtype: str) -> int:
    if tensor_bytes(shape, dtype) == 0:
        return 0
    rows = shape[0] if shape else 1
    return -(-rows // rows_per_block(shape, dtype))


def block_span(shape: Sequence[int], dtype: str, index: int) -> tuple[int, int]:
    """(first byte, number of bytes) of block `index` within the tensor's bytes."""
    step = rows_per_block(shape, dtype) * row_bytes(shape, dtype)
    start = index * step
    return start, min(step, tensor_bytes(shape, dtype) - start)


def blocks_of_rows(shape: Sequence[int], dtype: str, rows: slice) -> range:
    """The blocks that hold these rows (start and stop). Raises ValueError where they hold others, too."""
    step, count = rows_per_block(shape, dtype), shape[0]
    if not 0 <= rows.start < rows.stop <= count or rows.start % step or (rows.stop % step and rows.stop < count):
        raise ValueError(f"rows {rows.start} to {rows.stop} of {count} are not whole blocks of {step}")
    return range(rows.start // step, -(-rows.stop // step))


def cut(array: Array) -> Iterator[memoryview]:
    """The blocks of `array` in order, as views of its bytes (of a copy, where it isn't little-endian in C order)."""
    dtype = dtype_name(array.dtype.newbyteorder("<"))
    content = byte_view(np.ascontiguousarray(array, DTYPES[dtype]))
    for index in range(block_count(array.shape, dtype)):
        start, size = block_span(array.shape, dtype, index)
        yield content[start : start + size]


def byte_view(array: Array) -> memoryview:
    """The bytes of a C-ordered array, writable where the array is."""
    return array.reshape(-1).view(np.uint8).data


def shard_of(tensor: str, index: int) -> int:
    """The virtual shard (0 to 63) of the block named (tensor, slice); its content plays no part."""
    return int.from_bytes(canonical.digest([tensor, index])[:8], "big") % SHARDS


def row_bytes(shape: Sequence[int], dtype: str) -> int:
    elements = math.prod(shape[1:])
    packed = PACKED_ROW_BYTES.get(dtype)
    return packed(elements) if packed else elements * DTYPES[dtype].itemsize
