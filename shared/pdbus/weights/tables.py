"""Sparse tables: tensors whose rows are updated by a log, over the blocks of a sealed root (DESIGN.md section 4).

A table is a pseudo-layer of the version, `table.<name>`, that no worker computes with. It holds two tensors:

    table.<name>                                     fp32 [rows, width], cut into blocks like any other
    table.<name>/sealed/<origin>/<log>/<seq>         empty: its name says where in which log the blocks stand

A row is worth what the last entry of its log after `seq` says, else what the blocks hold. Sealing moves entries into
blocks and changes no row, so that a value depends on the table's origin, the row and the log's sequence only: whichever
version of the table's line is below. `origin` is drawn when the table is created; `log` names the log itself, since
one that was lost and made anew counts from 1 again.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace

import numpy as np

from pdbus.errors import Corrupt, InvalidRequest, NotFound
from pdbus.messages.rows import RowsUpdate
from pdbus.weights.blocks import Array, rows_per_block
from pdbus.weights.layer import TABLE, Layer, Tensor
from pdbus.weights.manifest import Manifest

LINE = "stable"
"""The line whose head says what tables there are."""
LARGEST_UPDATE_BYTES = 256 << 10
"""Of ids and values in one entry of a log."""
MOST_ROWS = (1 << 31) - 1
MOST_COLUMNS = 8192

_NAME = re.compile(r"[A-Za-z0-9_-]{1,64}")
_SEALED = re.compile(r"([^/]+)/sealed/([0-9a-f]{32})/([0-9a-f]{16})/(0|[1-9]\d{0,18})")
_ID_BYTES = 8


@dataclass(frozen=True, slots=True)
class Seal:
    """How far a table's blocks hold its log."""

    origin: str
    log: str
    seq: int


@dataclass(frozen=True, slots=True)
class Table:
    """A table of one version."""

    name: str
    tensor: Tensor
    seal: Seal

    @property
    def rows(self) -> int:
        return self.tensor.shape[0]

    @property
    def width(self) -> int:
        return self.tensor.shape[1]

    @property
    def block_rows(self) -> int:
        return rows_per_block(self.tensor.shape, self.tensor.dtype)

    @property
    def update_rows(self) -> int:
        """Rows in one entry of the log, at most."""
        return LARGEST_UPDATE_BYTES // (_ID_BYTES + 4 * self.width)

    @property
    def tensors(self) -> tuple[Tensor, Tensor]:
        """What its layer consists of."""
        seal = self.seal
        marker = f"{self.tensor.name}/sealed/{seal.origin}/{seal.log}/{seal.seq}"
        return self.tensor, Tensor(marker, "u8", (0,), ())

    def sealed(self, tensor: Tensor, log: str, seq: int) -> Table:
        """The table once the log up to `seq` is in the blocks of `tensor`."""
        return replace(self, tensor=tensor, seal=replace(self.seal, log=log, seq=seq))


def layer_name(table: str) -> str:
    """The table's layer, and its tensor. Raises InvalidRequest for what can't name a table."""
    if not _NAME.fullmatch(table):
        raise InvalidRequest(f"{table!r} can't name a table: 1 to 64 of A-Z a-z 0-9 _ -", param="name")
    return TABLE + table


def check_shape(rows: int, width: int) -> None:
    """Raises InvalidRequest for a table that can't be."""
    if not (0 < rows <= MOST_ROWS and 0 < width <= MOST_COLUMNS):
        raise InvalidRequest(f"a table has 1 to {MOST_ROWS} rows of 1 to {MOST_COLUMNS} columns", param="rows")


def tables(manifest: Manifest) -> Mapping[str, Table]:
    """The tables of a version by name."""
    found = (as_table(layer) for layer in manifest.layers if layer.name.startswith(TABLE))
    return {table.name: table for table in found}


def with_tables(manifest: Manifest, head: Manifest) -> Manifest:
    """A checkpoint's version, which has no tables, with those of its line's head: tables come last in a manifest."""
    return Manifest(manifest.layers + tuple(layer for layer in head.layers if layer.name.startswith(TABLE)))


def table(manifest: Manifest, name: str) -> Table:
    """Raises NotFound."""
    for layer in manifest.layers:
        if layer.name == layer_name(name):
            return as_table(layer)
    raise NotFound(f"version {manifest.root.hex()[:12]} has no table {name}")


def as_table(layer: Layer) -> Table:
    """Raises Corrupt where the layer is none."""
    found = {tensor.name: tensor for tensor in layer.tensors}
    tensor = found.pop(layer.name, None)
    markers = [match for name in found if (match := _SEALED.fullmatch(name)) and match[1] == layer.name]
    if tensor is None or len(markers) != 1 or len(found) != 1 or tensor.dtype != "fp32" or len(tensor.shape) != 2:
        raise Corrupt(f"the layer {layer.name} is no table")
    _, origin, log, seq = markers[0].groups()
    return Table(layer.name.removeprefix(TABLE), tensor, Seal(origin, log, int(seq)))


def encoded_ids(ids: Array) -> bytes:
    return np.ascontiguousarray(ids, "<u8").tobytes()


def decoded_ids(content: bytes, rows: int) -> Array:
    """int64 [n]. Raises InvalidRequest where they are not ids of a table of so many rows."""
    if len(content) % _ID_BYTES:
        raise InvalidRequest("ids are of 8 bytes each", param="ids")
    ids = np.frombuffer(content, "<u8")
    if len(ids) and int(ids.max()) >= rows:
        raise InvalidRequest(f"row {int(ids.max())} is asked for; the table has rows 0 to {rows - 1}", param="ids")
    return ids.astype(np.int64)


def encoded_values(values: Array) -> bytes:
    return np.ascontiguousarray(values, "<f4").tobytes()


def decoded_update(update: RowsUpdate, rows: int, width: int) -> tuple[Array, Array]:
    """(ids [n], values [n, width]), each id once. Raises InvalidRequest for one that doesn't fit the table."""
    ids = decoded_ids(update.ids, rows)
    if len(update.values) != 4 * width * len(ids):
        raise InvalidRequest(f"{len(ids)} rows of {width} don't have {len(update.values)} bytes", param="values")
    return last_of_each(ids, np.frombuffer(update.values, "<f4").reshape(len(ids), width))


def last_of_each(ids: Array, values: Array) -> tuple[Array, Array]:
    """Each id once, with its last values."""
    _, last = np.unique(ids[::-1], return_index=True)
    if len(last) == len(ids):
        return ids, values
    at = len(ids) - 1 - last
    return ids[at], values[at]
