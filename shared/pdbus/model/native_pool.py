"""The pool of KV pages as the native engine reads it: layout kv3 of kv/format.py."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any, TypeAlias

import numpy as np

from pdbus.buffer import Buffer
from pdbus.kv.codec import lend_rows, read_rows, write_rows
from pdbus.kv.format import NO_STREAMS, PAGE_TOKENS, KvDtype, PageFormat, StreamFormat
from pdbus.model.hadamard import rotate
from pdbus.native.abi import KvKind, PoolStruct

Array: TypeAlias = "np.ndarray[Any, Any]"

_KINDS: dict[KvDtype, KvKind] = {"fp32": KvKind.F32, "fp16": KvKind.F16, "int8": KvKind.I8}
_NUMPY: dict[KvDtype, str] = {"fp32": "<f4", "fp16": "<f2", "int8": "i1"}


class NativePool:
    """One array of bytes, [layers, pages, layer_bytes]; memory is taken as pages are written."""

    def __init__(self, page_format: PageFormat, pages: int, streams: StreamFormat = NO_STREAMS) -> None:
        if page_format.layout != "kv3":
            raise ValueError(f"the native engine can't compute from pages of {page_format}")
        self.format, self.pages, self.streams = page_format, pages, streams
        self.bytes: Array = np.empty((page_format.layers, pages, page_format.layer_bytes), np.uint8)
        pointers = (ctypes.c_void_p * page_format.layers)(*(layer.ctypes.data for layer in self.bytes))
        self._kept: Array = np.empty((len(streams.layers), pages, PAGE_TOKENS * streams.hidden), np.float32)
        kept = (ctypes.c_void_p * len(streams.layers))(*(one.ctypes.data for one in self._kept))
        at = (ctypes.c_int32 * len(streams.layers))(*streams.layers)
        self.struct = PoolStruct(
            _KINDS[page_format.dtype], pages, page_format.layer_bytes, pointers, len(streams.layers), 0, at, kept
        )

    def read_bytes(self, layers: slice, page_ids: Sequence[int]) -> memoryview:
        """Page after page, each layer after layer. A copy."""
        return read_rows(self.bytes, layers, page_ids)

    def lend_bytes(self, layer: int, page_ids: Sequence[int]) -> memoryview:
        """Of one layer, page after page, while nobody writes into them: without a copy where they lie in one run."""
        return lend_rows(self.bytes, layer, page_ids)

    def write_bytes(self, layers: slice, page_ids: Sequence[int], body: Buffer) -> None:
        """The reverse of `read_bytes`; the size must fit."""
        write_rows(self.bytes, layers, page_ids, body)

    def copy_below(self, layer: int, sources: Sequence[int], targets: Sequence[int]) -> None:
        """Makes the `targets` what the `sources` are below this layer."""
        for pages in self.bytes[:layer]:
            pages[list(targets)] = pages[list(sources)]
        for at, kept in zip(self.streams.layers, self._kept, strict=True):
            if at <= layer:
                kept[list(targets)] = kept[list(sources)]

    def layer(self, layer: int) -> Array:
        """The layer's storage itself, bytes [pages, layer_bytes]."""
        stored: Array = self.bytes[layer]
        return stored

    def gather(self, layer: int, page_ids: Sequence[int], length: int) -> tuple[Array, Array]:
        """K and V of a sequence's first `length` tokens, widened to fp32: each [length, kv_heads, head_dim]; copies."""
        form, tokens, width = self.format, PAGE_TOKENS, self.format.head_dim
        dtype = np.dtype(_NUMPY[form.dtype])
        heads = self.bytes[layer][list(page_ids)].reshape(len(page_ids), form.kv_heads, -1)
        values = tokens * width * dtype.itemsize
        parts = [np.ascontiguousarray(heads[..., at : at + values]).view(dtype) for at in (0, values)]
        four = 4 if form.dtype == "int8" else 1  # so many dimensions of K, tokens of V lie together
        k = parts[0].reshape(-1, form.kv_heads, width // four, tokens, four).astype(np.float32)
        v = parts[1].reshape(-1, form.kv_heads, tokens // four, width, four).astype(np.float32)
        k, v = k.transpose(0, 3, 1, 2, 4), v.transpose(0, 2, 4, 1, 3)  # tokens first
        shape = (-1, tokens, form.kv_heads, width)
        k, v = k.reshape(shape), v.reshape(shape)
        if form.dtype == "int8":
            scales = np.ascontiguousarray(heads[..., 2 * values :]).view("<f4").reshape(-1, form.kv_heads, 2, tokens)
            k, v = (x * scales[:, :, i].transpose(0, 2, 1)[..., None] for i, x in enumerate((k, v)))
            k = rotate(k.reshape(-1, width & -width).astype(np.float64)).astype(np.float32)  # its own inverse
        return k.reshape(-1, *shape[2:])[:length], v.reshape(-1, *shape[2:])[:length]
