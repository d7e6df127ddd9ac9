"""Batches as they are kept: every entry of a batch's log is appended only on the entry read last."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Callable, Sequence

from pdbus.errors import Conflict, NotFound, Overloaded
from pdbus.messages.jobs import BatchEntry, BatchLine, BatchState, BatchWork
from pdbus.router.jobs.durable import Durable
from pdbus.subjects import ANY, BATCH_JOBS, BATCHES, ToEvent

MOST_BATCHES = 1000
"""Of one tenant, those that ended within two days included."""
_READS_AT_ONCE = 16


class BatchLog:
    """Raises Unavailable while JetStream is away, Overloaded where it has no room."""

    def __init__(self, logs: Durable, model: str, now: Callable[[], float] = time.time) -> None:
        self._logs = logs
        self._work = BATCH_JOBS(model=model)
        self.now = now

    async def create(self, state: BatchState) -> BatchState:
        """Its message goes first, as that of a job. Raises Conflict for another one under its id."""
        known = await self.last(state.tenant, state.id)
        if known is None:
            if len(await self._logs.counts(BATCHES(tenant=state.tenant, batch=ANY))) >= MOST_BATCHES:
                raise Overloaded(f"{MOST_BATCHES} batches are kept, each for two days", retry_after_s=3600.0)
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

    async def append(self, state: BatchState, after: int, lines: Sequence[BatchLine] = ()) -> int:
        """Raises Conflict where the log's last entry has another sequence."""
        return await self._logs.append(_to(state), BatchEntry(state, tuple(lines)), expected_seq=after)

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
        to = BATCHES(tenant=tenant, batch=ANY)
        names = [tokens["batch"] for name in await self._logs.counts(to) if (tokens := BATCHES.tokens(name))]
        found: list[BatchState] = []
        for start in range(0, len(names), _READS_AT_ONCE):
            some = await asyncio.gather(*(self.last(tenant, name) for name in names[start : start + _READS_AT_ONCE]))
            found += [one[0] for one in some if one is not None]
        return sorted(found, key=lambda state: (-state.created_s, state.id))


def _to(state: BatchState) -> ToEvent[BatchEntry]:
    return BATCHES(tenant=state.tenant, batch=state.id)
