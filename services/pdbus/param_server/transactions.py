"""The open transactions that this server has staged blocks for, kept on disk so that a restart forgets none.

A transaction is open until the log has its commit or its abort. As long as it is, nothing that it staged is reclaimed.

tx-<id>.json     when it may be aborted, and the digests that it rests on
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pdbus.errors import Conflict, InvalidRequest, Overloaded
from pdbus.messages.common import Digest
from pdbus.param_server.disk import told
from pdbus.param_server.folder import read_digest, read_json, write_json

MOST_OPEN = 256
_ID = re.compile(r"[A-Za-z0-9_-]{1,64}")


@dataclass(eq=False, slots=True)
class Transaction:
    tx: str
    deadline_ns: int
    """Wall clock."""
    digests: set[Digest] = field(default_factory=set)


class Transactions:
    """Of one store. Used from one thread, except `pinned`."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._open: dict[str, Transaction] = {}

    def load(self) -> None:
        """Finds again what was open when the server stopped."""
        for path in sorted(self._folder.glob("tx-*.json")):
            found = _decoded(path.stem.removeprefix("tx-"), read_json(path))
            if found:
                self._open[found.tx] = found
            else:
                path.unlink()

    def __iter__(self) -> Iterator[Transaction]:
        return iter(tuple(self._open.values()))

    def __len__(self) -> int:
        return len(self._open)

    def __contains__(self, tx: str) -> bool:
        return tx in self._open

    @property
    def pinned(self) -> frozenset[Digest]:
        """All that open transactions rest on."""
        return frozenset(digest for one in tuple(self._open.values()) for digest in tuple(one.digests))

    def pin(self, tx: str, deadline_ns: int, digests: Iterable[Digest]) -> None:
        """Opens the transaction, if it isn't yet, and adds to what it rests on; durable when this returns.

        Raises InvalidRequest, Overloaded where too many are open, Conflict where its deadline was another."""
        if not _ID.fullmatch(tx):
            raise InvalidRequest("a transaction is named by 1 to 64 characters of A-Z a-z 0-9 _ -", param="tx")
        known = self._open.get(tx)
        if known is None and len(self._open) >= MOST_OPEN:
            raise Overloaded(f"{MOST_OPEN} updates are open here already", retry_after_s=1.0)
        one = known or Transaction(tx, deadline_ns)
        if one.deadline_ns != deadline_ns:
            raise Conflict(f"the transaction {tx} was begun with another deadline")
        new = set(digests) - one.digests
        if new or not known:
            one.digests |= new
            self._open[tx] = one
            write_json(self._path(tx), {"deadline_ns": deadline_ns, "digests": sorted(d.hex() for d in one.digests)})

    def close(self, tx: str) -> None:
        """The log has its end."""
        if self._open.pop(tx, None):
            with told(self._folder), contextlib.suppress(FileNotFoundError):
                self._path(tx).unlink()

    def _path(self, tx: str) -> Path:
        return self._folder / f"tx-{tx}.json"


def _decoded(tx: str, value: dict[str, Any]) -> Transaction | None:
    """None for a file that this server didn't write, or that was damaged."""
    match value:
        case {"deadline_ns": int(deadline_ns), "digests": [*texts]}:
            digests = {digest for text in texts if (digest := read_digest(text))}
            return Transaction(tx, deadline_ns, digests) if len(digests) == len(texts) and _ID.fullmatch(tx) else None
    return None
