"""The paged KV store of one engine: the bytes behind the page numbers of kv/pages.py."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from pdbus.kv.format import PageFormat


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

    def slots(self, page_ids: Sequence[int], start: int, length: int) -> Tensor:
        """Where the tokens `start` to `start + length` of a sequence lie, [length], as `write` wants them."""
        size = self.format.page_tokens
        return torch.tensor(
            [page_ids[at // size] * size + at % size for at in range(start, start + length)],
            dtype=torch.int64,
            device=self.device,
        )

    def write(self, layer: int, slots: Tensor, k: Tensor, v: Tensor) -> None:
        """Stores k and v, each [tokens, kv_heads, head_dim], at `slots` [tokens]."""
        size = self.format.page_tokens
        page, offset = slots // size, slots % size
        storage = self._layers[layer]
        storage[page, 0, offset] = k
        storage[page, 1, offset] = v

    def gather(self, layer: int, page_index: Tensor, length: int) -> tuple[Tensor, Tensor]:
        """K and V of the first `length` tokens of a sequence, each [length, kv_heads, head_dim]; copies."""
        heads, width = self.format.kv_heads, self.format.head_dim
        storage = self._layers[layer]
        # [pages, page_tokens, kv_heads, head_dim] -> [pages * page_tokens, kv_heads, head_dim]
        k = storage[:, 0].index_select(0, page_index).view(-1, heads, width)
        v = storage[:, 1].index_select(0, page_index).view(-1, heads, width)
        return k[:length], v[:length]
