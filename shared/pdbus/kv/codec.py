"""Pages as bytes, verbatim: for the hand-off (one layer, many pages), for cache tiers and swap (a page, all layers).

A body is whole pages in the pool's own layout (kv/format.py), so that what is cached, sent and computed from is the
same to the bit. Sizes are checked before anything is written: a short or long body never leaves half a page behind.
No torch here: what the bytes mean concerns only the engine whose pool it is.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol, TypeAlias

import numpy as np

from pdbus.buffer import Buffer
from pdbus.errors import Corrupt
from pdbus.kv.format import PageFormat, StreamFormat

Array: TypeAlias = "np.ndarray[Any, Any]"


class PagePool(Protocol):
    """The paged KV store of one engine, as all see it but the engine itself: opaque bytes behind page numbers.

    It knows nothing of ownership: callers write only to pages that they hold and that are not published."""

    format: PageFormat
    pages: int
    streams: StreamFormat

    def read_bytes(self, layers: slice, page_ids: Sequence[int]) -> memoryview:
        """Page after page, each layer after layer. A copy."""

    def lend_bytes(self, layer: int, page_ids: Sequence[int]) -> memoryview:
        """Of one layer, page after page, for as long as nobody writes into these pages: the pool's own memory where
        they lie there one after another, else a copy."""

    def write_bytes(self, layers: slice, page_ids: Sequence[int], body: Buffer) -> None:
        """The reverse of `read_bytes`; the size must fit."""

    def copy_below(self, layer: int, sources: Sequence[int], targets: Sequence[int]) -> None:
        """Makes the `targets` what the `sources` are below this layer: all of K and V, and the kept residual streams up
        to the one that enters it."""


def export_layer(pool: PagePool, layer: int, page_ids: Sequence[int]) -> memoryview:
    """The pages' K and V of one layer, page after page. A copy: later writes to the pool don't show in it."""
    return pool.read_bytes(slice(layer, layer + 1), page_ids)


def import_layer(pool: PagePool, layer: int, page_ids: Sequence[int], body: Buffer) -> None:
    """The reverse of `export_layer`, into pages that the caller holds. Raises Corrupt where the size doesn't fit."""
    _check_size(body, len(page_ids) * pool.format.layer_bytes)
    pool.write_bytes(slice(layer, layer + 1), page_ids, body)


def export_pages(pool: PagePool, page_ids: Sequence[int]) -> memoryview:
    """Page after page, each as `export_page` gives it. A copy."""
    return pool.read_bytes(slice(None), page_ids)


def import_pages(pool: PagePool, page_ids: Sequence[int], body: Buffer) -> None:
    """The reverse of `export_pages`. Raises Corrupt where the size doesn't fit."""
    _check_size(body, len(page_ids) * pool.format.page_bytes)
    pool.write_bytes(slice(None), page_ids, body)


def import_layers(pool: PagePool, layers: slice, page_ids: Sequence[int], body: Buffer) -> None:
    """Some neighbouring layers of pages: page after page, each layer after layer. Raises Corrupt likewise."""
    _check_size(body, len(page_ids) * (layers.stop - layers.start) * pool.format.layer_bytes)
    pool.write_bytes(layers, page_ids, body)


def export_page(pool: PagePool, page_id: int) -> memoryview:
    """One page of all layers, layer after layer. A copy."""
    return export_pages(pool, (page_id,))


def import_page(pool: PagePool, page_id: int, body: Buffer) -> None:
    """The reverse of `export_page`. Raises Corrupt where the size doesn't fit."""
    import_pages(pool, (page_id,), body)


def read_rows(rows: Array, layers: slice, page_ids: Sequence[int]) -> memoryview:
    """`PagePool.read_bytes` of a pool whose bytes lie in an array [layers, pages, layer_bytes]."""
    at = _at(page_ids)
    chosen = rows[layers][:, at].transpose(1, 0, 2)  # [pages, layers, layer_bytes]
    copied = np.array(chosen, order="C") if isinstance(at, slice) else np.ascontiguousarray(chosen)
    return memoryview(copied.data).cast("B")


def lend_rows(rows: Array, layer: int, page_ids: Sequence[int]) -> memoryview:
    """`PagePool.lend_bytes`, likewise."""
    return memoryview(rows[layer][_at(page_ids)].data).cast("B")


def write_rows(rows: Array, layers: slice, page_ids: Sequence[int], body: Buffer) -> None:
    """`PagePool.write_bytes`, likewise."""
    new = np.frombuffer(body, np.uint8).reshape(len(page_ids), -1, rows.shape[2])  # [pages, layers, layer_bytes]
    rows[layers][:, _at(page_ids)] = new.transpose(1, 0, 2)


def _at(page_ids: Sequence[int]) -> slice | list[int]:
    """As an index: one run where they follow one another, which numpy copies at once, or needs not to copy."""
    first, ids = page_ids[0] if page_ids else 0, list(page_ids)
    return slice(first, first + len(ids)) if ids == list(range(first, first + len(ids))) else ids


def _check_size(body: Buffer, wanted: int) -> None:
    size = memoryview(body).nbytes
    if size != wanted:
        raise Corrupt(f"KV of {wanted} bytes was expected, and {size} came")
