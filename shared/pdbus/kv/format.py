"""The layout of a KV page, as both ends of a hand-off and every cache tier must agree on it to the letter.

For each layer a page is one contiguous run of bytes, little-endian, in the layout of the engine that computes from it:

    kv1   for torch
          values   [2, page_tokens, kv_heads, head_dim] of the KV dtype: K of all its tokens, then V
          scales   [2, page_tokens, kv_heads] in fp32; int8 only: one for each token and head of K, then of V

    kv3   for the native kernels, always of 16 tokens (native/src/pages.h); KV head after KV head:
          K        [head_dim, 16] of the KV dtype; int8: [head_dim / 4, 16, 4], four dimensions of a token together
          V        [16, head_dim] of the KV dtype; int8: [4, head_dim, 4], four tokens of a dimension together
          scales   [2, 16] in fp32; int8 only: one for each token of K, then of V

A page of all layers is those runs, layer after layer. Pool, wire, cache tiers and swap file carry the bytes verbatim,
and know nothing of them but their number. K is kept after RoPE, so a page is valid at its own positions only (which its
prefix key pins); int8 pages of kv3 have it turned by a Hadamard matrix besides (native/src/pages.h).

In kv1 numbers become values thus (x: the head_dim numbers of one token and head, in fp32); kv3 rounds alike, but takes
the reciprocal of the int8 scale, has no smallest one, and leaves fp16 unlimited:

    fp32   x
    fp16   x limited to ±65504, rounded to the nearest, ties to even
    int8   scale = max(max |x| / 127, 2^-126); value = x / scale rounded to the nearest, ties to even; both divisions
           in fp32. It is read as value * scale, and is the same for whoever computes it: no kernel may do otherwise.

What attention reads has always been through this, also within the chunk that computed it.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Literal, TypeAlias, cast

from pdbus.errors import InvalidRequest

PAGE_TOKENS = 16

KvDtype: TypeAlias = Literal["fp32", "fp16", "int8"]
Layout: TypeAlias = Literal["kv1", "kv3"]

_DTYPE_BYTES: dict[KvDtype, int] = {"fp32": 4, "fp16": 2, "int8": 1}
_SCALE_BYTES = 4


@dataclass(frozen=True, slots=True)
class StreamFormat:
    """The residual stream as it enters some layers, which a pool keeps beside its pages, in fp32: what is computed
    again from there gives the same bits. It belongs to the worker that computed it, and doesn't travel."""

    layers: tuple[int, ...] = ()
    """From the lowest up; none below the first."""
    hidden: int = 0
    page_tokens: int = PAGE_TOKENS

    @property
    def page_bytes(self) -> int:
        """Bytes of one page's, in all of these layers."""
        return len(self.layers) * self.page_tokens * self.hidden * 4


NO_STREAMS = StreamFormat()


@dataclass(frozen=True, slots=True)
class PageFormat:
    """Sizes and dtype of the pages of one layer group; the layout is told above."""

    layers: int
    kv_heads: int
    head_dim: int
    page_tokens: int = PAGE_TOKENS
    dtype: KvDtype = "fp32"
    layout: Layout = "kv1"

    def __post_init__(self) -> None:
        if min(self.layers, self.kv_heads, self.head_dim, self.page_tokens) < 1:
            raise ValueError(f"every size of a page format must be at least 1: {self}")
        if self.layout == "kv3" and self.page_tokens != PAGE_TOKENS:
            raise ValueError(f"pages of this layout have {PAGE_TOKENS} tokens: {self}")
        if self.scale_bytes and self.value_bytes % _SCALE_BYTES:
            raise ValueError(f"the scales of {self} would not be aligned: it has an odd number of values")

    def __str__(self) -> str:
        """The spelling that travels in cards, reservations and prefix keys."""
        return f"{self.layout}-l{self.layers}-t{self.page_tokens}-h{self.kv_heads}-d{self.head_dim}-{self.dtype}"

    @classmethod
    def parse(cls, text: str) -> PageFormat:
        """The reverse of `str`. Raises InvalidRequest for anything else."""
        size = r"([1-9]\d{0,3})"
        found = re.fullmatch(rf"(kv[13])-l{size}-t{size}-h{size}-d{size}-(\w+)", text)
        if not found or found[6] not in _DTYPE_BYTES:
            raise InvalidRequest(f"{text[:80]!r} is no page format that this version knows")
        layers, page_tokens, kv_heads, head_dim = map(int, found.groups()[1:5])
        dtype, layout = cast(KvDtype, found[6]), cast(Layout, found[1])
        try:
            return cls(layers, kv_heads, head_dim, page_tokens, dtype, layout)
        except ValueError as error:
            raise InvalidRequest(str(error)) from None

    @property
    def value_bytes(self) -> int:
        """Bytes of one page's values in one layer: K and V."""
        return 2 * self.page_tokens * self.kv_heads * self.head_dim * _DTYPE_BYTES[self.dtype]

    @property
    def scale_bytes(self) -> int:
        """Bytes of their scales, which follow them; 0 where the dtype has none."""
        return 2 * self.page_tokens * self.kv_heads * _SCALE_BYTES if self.dtype == "int8" else 0

    @property
    def layer_bytes(self) -> int:
        """Bytes of one page in one layer."""
        return self.value_bytes + self.scale_bytes

    @property
    def page_bytes(self) -> int:
        """Bytes of one page in all layers."""
        return self.layers * self.layer_bytes

    def pages_for(self, tokens: int) -> int:
        """Pages that `tokens` tokens occupy, the last perhaps in part."""
        return -(-tokens // self.page_tokens)

    def pages_within(self, budget_bytes: int) -> int:
        """Whole pages that fit into a byte budget."""
        return budget_bytes // self.page_bytes
