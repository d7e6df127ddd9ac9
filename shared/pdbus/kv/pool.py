"""The paged KV store of one engine: the bytes behind the page numbers of kv/pages.py."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from pdbus.kv.format import PageFormat


@dataclass(frozen=True, slots=True)
class Slots:
    """A place in the pool for each of a step's tokens: its page and its offset there, both [tokens]."""

    pages: Tensor
    offsets: Tensor


class KvPool:
    """Per layer one tensor [pages, 2, page_tokens, kv_heads, head_dim]: K and V of a page lie side by side.

    It knows nothing of ownership: callers write only to pages that they hold and that are not published. Pages start
    undefined, and on the CPU take no memory until they are written."""

    def __init__(self, page_format: PageFormat, pages: int, device: torch.device | str = "cpu") -> None:
        self.format = page_format
        self.pages = pages
        self.device = torch.device(device)
        shape = (pages, 2, page_format.page_tokens, page_format.kv_heads, page_format.head_dim)
        self._layers = [torch.empty(shape, dtype=torch.float32, device=self.device) for _ in range(page_format.layers)]

    def layer(self, layer: int) -> Tensor:
        """The layer's storage itself, [pages, 2, page_tokens, kv_heads, head_dim]."""
        return self._layers[layer]

    def page_index(self, page_ids: Sequence[int]) -> Tensor:
        """Page numbers as `gather` wants them, [pages]: made once per step, used in every layer."""
        return torch.tensor(page_ids, dtype=torch.int64, device=self.device)

    def slots(self, runs: Iterable[tuple[Sequence[int], int, int]]) -> Slots:
        """Where tokens lie, for `write`. A run is (a sequence's page ids, its first token meant, how many)."""
        size = self.format.page_tokens
        pages: list[int] = []
        offsets: list[int] = []
        for page_ids, start, length in runs:
            for token in range(start, start + length):
                pages.append(page_ids[token // size])
                offsets.append(token % size)
        return Slots(self.page_index(pages), self.page_index(offsets))

    def write(self, layer: int, slots: Slots, k: Tensor, v: Tensor) -> None:
        """Stores k and v, each [tokens, kv_heads, head_dim], at the slots of these tokens."""
        storage = self._layers[layer]
        storage[slots.pages, 0, slots.offsets] = k
        storage[slots.pages, 1, slots.offsets] = v

    def gather(self, layer: int, page_index: Tensor, length: int) -> tuple[Tensor, Tensor]:
        """K and V of the first `length` tokens of a sequence, each [length, kv_heads, head_dim]; copies."""
        heads, width = self.format.kv_heads, self.format.head_dim
        storage = self._layers[layer]
        # [pages, page_tokens, kv_heads, head_dim] -> [pages * page_tokens, kv_heads, head_dim]
        k = storage[:, 0].index_select(0, page_index).view(-1, heads, width)
        v = storage[:, 1].index_select(0, page_index).view(-1, heads, width)
        return k[:length], v[:length]
