"""The layout of a KV page, as both ends of a hand-off and every cache tier must agree on it to the letter."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Literal, TypeAlias, cast

from pdbus.errors import InvalidRequest

PAGE_TOKENS = 16

KvDtype: TypeAlias = Literal["fp32"]

_DTYPE_BYTES: dict[KvDtype, int] = {"fp32": 4}


@dataclass(frozen=True, slots=True)
class PageFormat:
    """One page: for each layer, K and V of `page_tokens` tokens as [2, page_tokens, kv_heads, head_dim].

    The bytes are little-endian and contiguous per page and layer; pool, wire and cache tiers carry them verbatim.
    K is kept after RoPE, so a page is valid at its own positions only (which its prefix key pins)."""

    layers: int
    kv_heads: int
    head_dim: int
    page_tokens: int = PAGE_TOKENS
    dtype: KvDtype = "fp32"

    def __post_init__(self) -> None:
        if min(self.layers, self.kv_heads, self.head_dim, self.page_tokens) < 1:
            raise ValueError(f"every size of a page format must be at least 1: {self}")

    def __str__(self) -> str:
        """The spelling that travels in cards, reservations and prefix keys."""
        return f"kv1-l{self.layers}-t{self.page_tokens}-h{self.kv_heads}-d{self.head_dim}-{self.dtype}"

    @classmethod
    def parse(cls, text: str) -> PageFormat:
        """The reverse of `str`. Raises InvalidRequest for anything else."""
        found = re.fullmatch(r"kv1-l([1-9]\d{0,3})-t([1-9]\d{0,3})-h([1-9]\d{0,3})-d([1-9]\d{0,3})-(\w+)", text)
        if not found or found[5] not in _DTYPE_BYTES:
            raise InvalidRequest(f"{text[:80]!r} is no page format that this version knows")
        layers, page_tokens, kv_heads, head_dim = map(int, found.groups()[:4])
        return cls(layers, kv_heads, head_dim, page_tokens, cast(KvDtype, found[5]))

    @property
    def layer_bytes(self) -> int:
        """Bytes of one page in one layer: K and V."""
        return 2 * self.page_tokens * self.kv_heads * self.head_dim * _DTYPE_BYTES[self.dtype]

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
