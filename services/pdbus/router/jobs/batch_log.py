"""Batches as they are kept: every entry of a batch's log is appended only on the entry read last."""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator, Callable, Sequence

from pdbus.errors import Conflict, NotFound, QuotaExceeded
from pdbus.messages.jobs import BatchEntry, BatchLine, BatchState, BatchWork
from pdbus.router.jobs.durable import Durable, last_of_each
from pdbus.router.jobs.shares import Shares
from pdbus.subjects import ANY, BATCH_JOBS, BATCHES, ToEvent

MOST_BATCHES = 1000
"""Of one tenant, those that ended within two days included."""
_ENTRY_BYTES = 1024
"""Of a batch that has just begun, about."""


class BatchLog:
    """Raises Unavailable while JetStream is away, Overloaded where it has no room."""

    def __init__(self, logs: Durable, model: str, shares: Shares, now: Callable[[], float] = time.time) -> None:
        self._logs, self._shares = logs, shares
        self._work = BATCH_JOBS(model=model)
        self.now = now

    async def create(self, state: BatchState) -> BatchState:
        """Its message goes first, as that of a job. Raises Conflict for another one under its id, QuotaExceeded."""
        known = await self.last(state.tenant, state.id)
        if known is None:
            if len(await self._logs.counts(BATCHES(tenant=state.tenant, batch=ANY))) >= MOST_BATCHES:
                raise QuotaExceeded(f"{MOST_BATCHES} batches are kept, each for two days", retry_after_s=3600.0)
            with self._shares.hold(state.tenant, _ENTRY_BYTES):
                id_ = f"{state.tenant}.{state.id}.{state.digest.hex()}"
                await self._logs.enqueue(self._work, BatchWork(state), message_id=id_)
                known = await self.accepted(state)
        if known[0].digest != state.digest:
            raise Conflict("this idempotency key was used for another batch", param="Idempotency-Key")
        return known[0]

    async def accepted(self, state: BatchState) -> tuple[BatchState, int]:
        """Its last state and sequence, after an entry that accepts it where there was none."""
        while (known := await self.last(state.tenant, state.id)) is None:
            try:
                seq = await self.append(state, 0)
            except Conflict:
                continue
            return state, seq
        return known

    async def append(
        self, state: BatchState, after: int, lines: Sequence[BatchLine] = (), *, replaces: bool = False
    ) -> int:
        """Raises Conflict where the log's last entry has another sequence. `replaces`: all entries before it go."""
        entry = BatchEntry(state, tuple(lines))
        return await self._logs.append(_to(state), entry, expected_seq=after, replaces=replaces)

    async def change(self, tenant: str, id_: str, to: Callable[[BatchState], BatchState | None]) -> BatchState:
        """Into what `to` makes of its state, None: nothing. Raises NotFound."""
        while True:
            state, seq = await self.known(tenant, id_)
            changed = to(state)
            if changed is None:
                return state
            try:
                await self.append(changed, seq)
            except Conflict:
                continue
            return changed

    async def last(self, tenant: str, id_: str) -> tuple[BatchState, int] | None:
        found = await self._logs.last(BATCHES(tenant=tenant, batch=id_))
        return None if found is None else (found.entry.state, found.seq)

    async def known(self, tenant: str, id_: str) -> tuple[BatchState, int]:
        """Raises NotFound, also for what is another's."""
        if not 0 < len(id_) <= 128 or (found := await self.last(tenant, id_)) is None:
            raise NotFound(f"there is no batch {id_[:128]!r}", param="id")
        return found

    async def entries(self, state: BatchState, after: int = 0) -> AsyncGenerator[tuple[int, BatchEntry], None]:
        """Those after that sequence."""
        while record := await self._logs.next(_to(state), after):
            yield record.seq, record.entry
            after = record.seq

    async def of(self, tenant: str) -> list[BatchState]:
        """The newest first."""
        last = await last_of_each(self._logs, BATCHES(tenant=tenant, batch=ANY))
        found = [record.entry.state for _, record in last]
        return sorted(found, key=lambda state: (-state.created_s, state.id))


def _to(state: BatchState) -> ToEvent[BatchEntry]:
    return BATCHES(tenant=state.tenant, batch=state.id)
