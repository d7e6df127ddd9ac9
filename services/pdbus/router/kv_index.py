"""Which prefixes each worker has in its pages, as the workers tell. Pure.

Routers choose by it and nothing else: a wrong entry costs a worse choice, since workers compare whole keys and tokens
themselves. A worker's messages are numbered within its incarnation; a missed one is repaired by a snapshot.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from pdbus.messages.router import INDEX_KEY_BYTES, KvIndex, KvIndexSnapshot
from pdbus.router.prefixes import PrefixKeys

MOST_KEYS = 1 << 17
"""Of one worker: 2 million tokens, as many as a snapshot can carry. What it stores beyond is not known here."""
_MOST_HELD = 64
"""Messages kept while an earlier one is missing."""


@dataclass(slots=True)
class _Worker:
    incarnation: str
    seq: int = 0
    """Up to here every message is in `keys`."""
    keys: set[bytes] = field(default_factory=set)
    held: dict[int, KvIndex] = field(default_factory=dict)

    def take(self, message: KvIndex) -> None:
        if message.clear:
            self.keys.clear()
        self.keys.difference_update(message.evicted)
        self.keys.update(message.stored[: MOST_KEYS - len(self.keys)])
        self.seq = message.seq

    def go_on(self) -> None:
        """Takes what was held and is next."""
        while following := self.held.pop(self.seq + 1, None):
            self.take(following)
        self.held = {seq: message for seq, message in self.held.items() if seq > self.seq}


class KvTable:
    """Bounded: MOST_KEYS keys for each worker that its user lets in."""

    def __init__(self) -> None:
        self._workers: dict[str, _Worker] = {}

    def apply(self, message: KvIndex) -> bool:
        """Takes a message. False where earlier ones of this incarnation are missing: then a snapshot is wanted."""
        known = self._workers.get(message.worker)
        if known is None or known.incarnation != message.incarnation:
            known = self._workers[message.worker] = _Worker(message.incarnation)
        if message.seq <= known.seq:
            return True
        if message.clear or message.seq == known.seq + 1:
            known.take(message)
            known.go_on()
        elif len(known.held) < _MOST_HELD:
            known.held[message.seq] = message
        return message.seq <= known.seq

    def load(self, worker: str, snapshot: KvIndexSnapshot) -> bool:
        """Takes a snapshot in place of all messages up to its number. False where some after it are missing."""
        old = self._workers.get(worker)
        same = old is not None and old.incarnation == snapshot.incarnation
        if old and same and old.seq > snapshot.seq:
            return not old.held
        most = MOST_KEYS * INDEX_KEY_BYTES
        ends = range(INDEX_KEY_BYTES, min(len(snapshot.keys), most) + 1, INDEX_KEY_BYTES)
        keys = {snapshot.keys[end - INDEX_KEY_BYTES : end] for end in ends}
        new = _Worker(snapshot.incarnation, snapshot.seq, keys, old.held if old and same else {})
        self._workers[worker] = new
        new.go_on()
        return not new.held

    def incarnation(self, worker: str) -> str | None:
        """Whose pages are known here."""
        known = self._workers.get(worker)
        return known.incarnation if known else None

    def forget_all_but(self, workers: Iterable[str]) -> None:
        for worker in self._workers.keys() - set(workers):
            del self._workers[worker]

    def keys_of(self, worker: str) -> int:
        known = self._workers.get(worker)
        return len(known.keys) if known else 0

    def matching(self, keys: PrefixKeys, workers: Mapping[str, str]) -> dict[str, int]:
        """How many of the prompt's first pages each of `workers` (id -> incarnation) has; those with none are left out.

        Makes no more keys than it takes to know."""
        matching = {
            worker: known.keys
            for worker, incarnation in workers.items()
            if (known := self._workers.get(worker)) and known.incarnation == incarnation and known.keys
        }
        found: dict[str, int] = {}
        for page in range(len(keys)):
            if not matching:
                break
            cut = keys.cut(page)
            for worker in [worker for worker, have in matching.items() if cut not in have]:
                found[worker] = page
                del matching[worker]
        found |= dict.fromkeys(matching, len(keys))
        return {worker: pages for worker, pages in found.items() if pages}
