"""Pages as bytes, verbatim: for the hand-off (one layer, many pages), for cache tiers and swap (a page, all layers).

A body is whole pages in the pool's own layout (kv/format.py), so that what is cached, sent and computed from is the
same to the bit. Sizes are checked before anything is written: a short or long body never leaves half a page behind.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeAlias

import numpy as np
import torch
from torch import Tensor

from pdbus.errors import Corrupt
from pdbus.kv.pool import KvPool

Buffer: TypeAlias = bytes | bytearray | memoryview


def export_layer(pool: KvPool, layer: int, page_ids: Sequence[int]) -> memoryview:
    """The pages' K and V of one layer, page after page. A copy: later writes to the pool don't show in it."""
    return _exported(pool.bytes[layer].index_select(0, pool.page_index(page_ids)))


def import_layer(pool: KvPool, layer: int, page_ids: Sequence[int], body: Buffer) -> None:
    """The reverse of `export_layer`, into pages that the caller holds. Raises Corrupt where the size doesn't fit."""
    _check_size(body, len(page_ids) * pool.format.layer_bytes)
    _fill(pool.bytes[layer], page_ids, body)


def export_pages(pool: KvPool, page_ids: Sequence[int]) -> memoryview:
    """Page after page, each as `export_page` gives it. A copy."""
    chosen = pool.bytes.index_select(1, pool.page_index(page_ids))  # [layers, pages, layer_bytes]
    return _exported(chosen.transpose(0, 1).contiguous())


def import_pages(pool: KvPool, page_ids: Sequence[int], body: Buffer) -> None:
    """The reverse of `export_pages`. Raises Corrupt where the size doesn't fit."""
    size = pool.format.page_bytes
    _check_size(body, len(page_ids) * size)
    whole = memoryview(body)
    for at, page_id in enumerate(page_ids):
        _fill(pool.bytes[:, page_id], range(pool.format.layers), whole[at * size : (at + 1) * size])


def export_page(pool: KvPool, page_id: int) -> memoryview:
    """One page of all layers, layer after layer. A copy."""
    return _exported(pool.bytes[:, page_id].clone(memory_format=torch.contiguous_format))


def import_page(pool: KvPool, page_id: int, body: Buffer) -> None:
    """The reverse of `export_page`. Raises Corrupt where the size doesn't fit."""
    _check_size(body, pool.format.page_bytes)
    _fill(pool.bytes[:, page_id], range(pool.format.layers), body)


def _exported(chosen: Tensor) -> memoryview:
    return memoryview(chosen.cpu().numpy().data).cast("B")


def _fill(rows: Tensor, chosen: Sequence[int], body: Buffer) -> None:
    """Writes the body to the chosen rows of `rows` [any, layer_bytes]."""
    new = np.frombuffer(body, dtype=np.uint8).reshape(len(chosen), -1)
    if rows.device.type == "cpu":
        rows.numpy()[list(chosen)] = new
    else:  # torch wants a buffer that may be written; here it is only read from
        rows[list(chosen)] = torch.from_numpy(new.copy()).to(rows.device)


def _check_size(body: Buffer, wanted: int) -> None:
    size = memoryview(body).nbytes
    if size != wanted:
        raise Corrupt(f"KV of {wanted} bytes was expected, and {size} came")
