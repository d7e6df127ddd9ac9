"""The arrays that blocks of weights are fetched into, and what these stand for where they are packed."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import numpy as np

from pdbus.messages.common import Digest
from pdbus.peers.model_cache import Want
from pdbus.weights.blocks import DTYPES, PACKED_ROW_BYTES, Array, block_span, byte_view, row_bytes, rows_per_block
from pdbus.weights.layer import Tensor
from pdbus.weights.packed import Int8Rows, widened


def room(tensor: Tensor, blocks: range) -> Array:
    """An array for these blocks of the tensor; of bytes [rows, bytes] where it is packed."""
    whole = blocks == range(len(tensor.blocks))
    if not tensor.shape:
        return np.empty((), DTYPES[tensor.dtype])
    step = rows_per_block(tensor.shape, tensor.dtype)
    rows = tensor.shape[0] if whole else min(blocks.stop * step, tensor.shape[0]) - blocks.start * step
    if tensor.dtype in PACKED_ROW_BYTES:
        return np.empty((rows, row_bytes(tensor.shape, tensor.dtype)), np.uint8)
    return np.empty((rows, *tensor.shape[1:]), DTYPES[tensor.dtype])


def wants_of(chosen: Iterable[tuple[Tensor, Iterable[int], Array]]) -> dict[Digest, Want]:
    """What to bring, by digest: blocks of each tensor into an array of these alone. An equal block may have several
    names, and goes to several places."""
    wants: dict[Digest, Want] = {}
    for tensor, indices, array in chosen:
        content, filled = byte_view(array), 0
        for index in indices:
            digest = tensor.blocks[index]
            _, size = block_span(tensor.shape, tensor.dtype, index)
            want = wants.setdefault(digest, Want(digest, (tensor.name, index), []))
            want.places.append(content[filled : filled + size])
            filled += size
    return wants


def unpacked(tensors: Iterable[Tensor], arrays: Mapping[str, Array]) -> dict[str, Array | Int8Rows]:
    """What the packed rows of these tensors stand for. Slow: call it in a thread."""
    found: dict[str, Array | Int8Rows] = {}
    for tensor in tensors:
        rows = arrays[tensor.name]
        if tensor.dtype == "int8" and len(tensor.shape) == 2:
            found[tensor.name] = Int8Rows.unpacked(rows, tensor.shape[1])
        else:
            found[tensor.name] = widened(tensor.dtype, rows, (len(rows), *tensor.shape[1:]))
    return found
