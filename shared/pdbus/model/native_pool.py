"""The pool of KV pages as the native engine reads it: raw bytes per page and layer (layout: native/src/pages.h)."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

import numpy as np

from pdbus.native.library import LANES, KvKind, PoolStruct

Array: TypeAlias = "np.ndarray[Any, Any]"
KvDtype: TypeAlias = Literal["fp32", "fp16", "int8"]

_KINDS: dict[KvDtype, tuple[KvKind, int]] = {"fp32": (KvKind.F32, 4), "fp16": (KvKind.F16, 2), "int8": (KvKind.I8, 1)}
PAGE_TOKENS = LANES


@dataclass(frozen=True, slots=True)
class NativePageFormat:
    """One page in one layer, per KV head: K [head_dim, 16], V [16, head_dim], and with int8 two fp32 [16] of scales."""

    layers: int
    kv_heads: int
    head_dim: int
    dtype: KvDtype

    @property
    def layer_bytes(self) -> int:
        scales = 2 * PAGE_TOKENS * 4 if self.dtype == "int8" else 0
        return self.kv_heads * (2 * PAGE_TOKENS * self.head_dim * _KINDS[self.dtype][1] + scales)


class NativePool:
    """Per layer one array of bytes [pages, layer_bytes]; memory is taken as pages are written."""

    def __init__(self, page_format: NativePageFormat, pages: int) -> None:
        self.format, self.pages = page_format, pages
        self._layers = [np.empty((pages, page_format.layer_bytes), np.uint8) for _ in range(page_format.layers)]
        pointers = (ctypes.c_void_p * page_format.layers)(*(layer.ctypes.data for layer in self._layers))
        self.struct = PoolStruct(_KINDS[page_format.dtype][0], pages, page_format.layer_bytes, pointers)

    def layer(self, layer: int) -> Array:
        """The layer's storage itself, bytes [pages, layer_bytes]."""
        return self._layers[layer]

    def gather(self, layer: int, page_ids: Sequence[int], length: int) -> tuple[Array, Array]:
        """K and V of a sequence's first `length` tokens, widened to fp32: each [length, kv_heads, head_dim]; copies."""
        form, tokens, width = self.format, PAGE_TOKENS, self.format.head_dim
        dtype = {"fp32": "<f4", "fp16": "<f2", "int8": "i1"}[form.dtype]
        heads = self._layers[layer][list(page_ids)].reshape(len(page_ids), form.kv_heads, -1)
        values = tokens * width * _KINDS[form.dtype][1]
        k = np.ascontiguousarray(heads[..., :values]).view(dtype).reshape(-1, form.kv_heads, width, tokens)
        v = np.ascontiguousarray(heads[..., values : 2 * values]).view(dtype).reshape(-1, form.kv_heads, tokens, width)
        k, v = k.astype(np.float32), v.astype(np.float32)
        if form.dtype == "int8":
            scales = np.ascontiguousarray(heads[..., 2 * values :]).view("<f4").reshape(-1, form.kv_heads, 2, tokens)
            k, v = k * scales[:, :, 0, None, :], v * scales[:, :, 1, :, None]
        flat = (-1, form.kv_heads, width)
        return k.transpose(0, 3, 1, 2).reshape(flat)[:length], v.transpose(0, 2, 1, 3).reshape(flat)[:length]
