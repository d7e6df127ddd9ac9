"""Pages as bytes, verbatim: for the hand-off (one layer, many pages) and for cache tiers (one page, all layers).

A body is whole pages in the pool's own layout (kv/format.py), so that what is cached, sent and computed from is the
same to the bit. Sizes are checked before anything is written: a short or long body never leaves half a page behind.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeAlias

import numpy as np
import torch

from pdbus.errors import Corrupt
from pdbus.kv.pool import KvPool

Buffer: TypeAlias = bytes | bytearray | memoryview


def export_layer(pool: KvPool, layer: int, page_ids: Sequence[int]) -> memoryview:
    """The pages' K and V of one layer, page after page. A copy: later writes to the pool don't show in it."""
    chosen = pool.layer(layer).index_select(0, pool.page_index(page_ids))  # [pages, 2, page_tokens, kv_heads, head_dim]
    return memoryview(chosen.cpu().numpy().data).cast("B")


def import_layer(pool: KvPool, layer: int, page_ids: Sequence[int], body: Buffer) -> None:
    """The reverse of `export_layer`, into pages that the caller holds. Raises Corrupt where the size doesn't fit."""
    _check_size(body, len(page_ids) * pool.format.layer_bytes)
    storage = pool.layer(layer)
    pages = np.frombuffer(body, dtype="<f4").reshape(len(page_ids), *storage.shape[1:])
    for page_id, page in zip(page_ids, pages, strict=True):
        storage[page_id].copy_(_tensor(page))


def export_page(pool: KvPool, page_id: int) -> bytes:
    """One page of all layers, layer after layer."""
    return b"".join(pool.layer(layer)[page_id].cpu().numpy().tobytes() for layer in range(pool.format.layers))


def import_page(pool: KvPool, page_id: int, body: Buffer) -> None:
    """The reverse of `export_page`. Raises Corrupt where the size doesn't fit."""
    _check_size(body, pool.format.page_bytes)
    layers = np.frombuffer(body, dtype="<f4").reshape(pool.format.layers, *pool.layer(0).shape[1:])
    for layer, page in enumerate(layers):
        pool.layer(layer)[page_id].copy_(_tensor(page))


def _check_size(body: Buffer, wanted: int) -> None:
    size = memoryview(body).nbytes
    if size != wanted:
        raise Corrupt(f"KV of {wanted} bytes was expected, and {size} came")


def _tensor(page: np.ndarray) -> torch.Tensor:
    # torch refuses to promise that a read-only buffer stays so; here it is only read from.
    return torch.from_numpy(page if page.flags.writeable else page.copy())
