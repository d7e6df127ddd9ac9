"""Which attempt owns a session: the fence against late, repeated and cancelled runs. Pure; time is passed in."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass
from typing import TypeVar

from pdbus.context import LONGEST_DEADLINE_S
from pdbus.errors import Cancelled, PdbusError, StaleAttempt, WireError
from pdbus.messages.workers import Cancel

K = TypeVar("K")

CAPACITY = 65_536
"""Entries kept of each kind; beyond it the oldest go first."""


@dataclass(slots=True)
class _Known:
    attempt: int
    seen_s: float
    failure: WireError | None = None
    """Not the exception: by its traceback that would keep all that the attempt held, for as long as this is known."""


class Attempts:
    """The newest attempt of each session and the newest cancelled attempt of each request.

    An entry outlives every deadline, so that no run which could still arrive finds it forgotten.
    """

    def __init__(self) -> None:
        self._newest: OrderedDict[str, _Known] = OrderedDict()  # by session
        self._cancelled: OrderedDict[tuple[str, int | None], _Known] = OrderedDict()  # by request and choice

    def __len__(self) -> int:
        """Entries of both kinds."""
        return len(self._newest) + len(self._cancelled)

    def admit(self, request_id: str, choice: int, session: str, attempt: int, now_s: float) -> bool:
        """True: a new attempt, now the session's newest. False: the newest one again.

        Raises StaleAttempt where a newer one is known, Cancelled where this one was cancelled, and the failure that
        `fail` noted where it has failed here already.
        """
        known = self._newest.get(session)
        if known and attempt == known.attempt and known.failure:
            raise known.failure.to_exception()
        for scope in ((request_id, None), (request_id, choice)):
            tombstone = self._cancelled.get(scope)
            if tombstone and attempt <= tombstone.attempt:
                raise Cancelled(f"attempt {attempt} of {session} was cancelled")
        if known and attempt < known.attempt:
            raise StaleAttempt(f"attempt {attempt} of {session} is older than {known.attempt}")
        if known and attempt == known.attempt:
            return False
        self._put(self._newest, session, _Known(attempt, now_s), now_s)
        return True

    def fail(self, session: str, attempt: int, failure: PdbusError) -> None:
        """Further runs of this attempt are refused with `failure`."""
        known = self._newest.get(session)
        if known and known.attempt == attempt:
            known.failure = WireError.of(failure)

    def forget(self, session: str, attempt: int) -> None:
        """The attempt was refused before it held anything: its next run counts as new."""
        known = self._newest.get(session)
        if known and known.attempt == attempt:
            del self._newest[session]

    def cancel(self, message: Cancel, now_s: float) -> None:
        """Refuses attempts up to this one from now on."""
        scope = (message.request_id, message.choice)
        known = self._cancelled.get(scope)
        attempt = max(message.attempt, known.attempt if known else 0)
        self._put(self._cancelled, scope, _Known(attempt, now_s), now_s)

    def _put(self, table: OrderedDict[K, _Known], key: K, value: _Known, now_s: float) -> None:
        table[key] = value
        table.move_to_end(key)
        while table and (len(table) > CAPACITY or next(iter(table.values())).seen_s < now_s - LONGEST_DEADLINE_S):
            table.popitem(last=False)
