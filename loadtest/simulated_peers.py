"""What passes between simulated prefill and decode workers of one process, in the place of KV."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Protocol

from pdbus.messages.common import Ticket, session_of
from pdbus.messages.workers import Cancel

Key = tuple[str, int]
"""(session, attempt)."""


class Decoding(Protocol):
    """A simulated decode worker, as far as its peers know it."""

    id: str

    def begin(self, ticket: Ticket) -> None: ...


@dataclass
class Peers:
    """The hand-over between simulated workers of one process: decode goes on when prefill and `run` are both there."""

    _ready: set[Key] = field(default_factory=set)
    _waiting: dict[Key, tuple[Decoding, Ticket]] = field(default_factory=dict)

    def hand_over(self, key: Key) -> None:
        waiting = self._waiting.pop(key, None)
        if waiting:
            waiting[0].begin(waiting[1])
        else:
            self._ready.add(key)

    def await_handoff(self, worker: Decoding, key: Key, ticket: Ticket) -> None:
        if key in self._ready:
            self._ready.discard(key)
            worker.begin(ticket)
        else:
            self._waiting[key] = (worker, ticket)

    def waits(self, worker: Decoding, key: Key) -> bool:
        return key in self._waiting and self._waiting[key][0] is worker

    def waiting_for(self, worker: str) -> int:
        return sum(waiting.id == worker for waiting, _ in self._waiting.values())

    def died(self, worker: Decoding) -> None:
        """What it waited for has nobody any more."""
        self._waiting = {key: waits for key, waits in self._waiting.items() if waits[0] is not worker}

    def drop(self, worker: Decoding, message: Cancel) -> None:
        """The KV that was handed over goes with the attempt."""
        for key, (waiting, ticket) in list(self._waiting.items()):
            if waiting is worker and ticket.attempt <= message.attempt and meant(key, message):
                del self._waiting[key]
        self._ready -= {key for key in self._ready if key[1] <= message.attempt and meant(key, message)}


def meant(key: Key, message: Cancel) -> bool:
    session = key[0]
    if not session.startswith(message.request_id):
        return False
    if message.choice is None:
        return session.rpartition("-")[0] == message.request_id
    return session == session_of(message.request_id, message.choice)
