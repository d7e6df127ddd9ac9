"""Sparse tables: what their row logs hold, and how rows are asked for at a param-server."""

from __future__ import annotations

from dataclasses import dataclass

from pdbus.messages.common import Digest


@dataclass(frozen=True, slots=True)
class RowsUpdate:
    """New values of rows: one entry of the log, whose sequence is theirs. Of a row that comes twice the last counts."""

    ids: bytes
    """u64 each, little-endian."""
    values: bytes
    """fp32, little-endian, [rows, width]."""


@dataclass(frozen=True, slots=True)
class TableRead:
    """What are these rows now, and at least as of the log's sequence `at_least`?"""

    table: str
    ids: bytes
    """As in RowsUpdate."""
    at_least: int = 0
    receiver: str = ""
    """Bulk address of the reader, where the values are too many for a message; else empty."""
    stream: str = ""


@dataclass(frozen=True, slots=True)
class TableRows:
    """Rows of a table, all as of the same sequence `seq`."""

    server: str
    root: Digest
    """The version whose blocks are below the log."""
    origin: str
    """Names the table's creation: a value depends on that, the log, the row and the sequence, and on nothing else."""
    log: str
    """Names the log that `seq` counts in."""
    seq: int
    width: int
    values: bytes = b""
    """fp32, in the order asked for; empty where they come on the bulk stream."""
    behind: bool = False
    """This server isn't as far as `at_least`: no values come. Another one may be, or this one soon."""
