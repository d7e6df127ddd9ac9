"""Working on a batch: its file is read once to be checked and once to be answered, each line as a job of its own.

Whoever works on it appends the results of its lines only on the entry that it read last. A second router at the same
batch (the first one hangs, or is slow to die) finds the other's lines there, and drops what it has of them itself.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing, suppress

import msgspec

from pdbus.errors import Conflict, NotFound
from pdbus.messages.jobs import BatchError, BatchLine, BatchState, BatchStatus, BatchWork
from pdbus.router.jobs import lines
from pdbus.router.jobs.batch_check import check
from pdbus.router.jobs.batch_log import BatchLog
from pdbus.router.jobs.batch_states import MOST_STALLED, begun, ended, refused, with_lines
from pdbus.router.jobs.durable import Taken
from pdbus.router.jobs.execute import Asked, Executor, Seen
from pdbus.router.jobs.files import FileStore
from pdbus.router.jobs.progress import LOOK_AGAIN_S, Progress, wait_news
from pdbus.router.jobs.shares import Shares
from pdbus.tasks import cancelled

log = logging.getLogger(__name__)

LINES_AT_ONCE = 32
_GROUP_BYTES = 100_000
"""Of results, after which an entry is full; the last of them may have as much again as a job's answer."""
_LATE_AT_ONCE = 200
"""Lines in an entry that tell no more than this: with ids of 512 characters they fit a message."""
_NO_ROOM = msgspec.json.encode(
    {"code": "quota_exceeded", "message": "there is no room for its answer: delete files that are no longer needed"}
)
_LATE = msgspec.json.encode({"code": "batch_expired", "message": "there was no room for it within a day"})


class BatchWorker:
    """What is done with one message of the queue of batches."""

    def __init__(
        self, batches: BatchLog, files: FileStore, executor: Executor, progress: Progress, shares: Shares
    ) -> None:
        """`batches`, `files`: by patient logs (durable.py)."""
        self._batches, self._files, self._executor, self._progress = batches, files, executor, progress
        self._shares = shares

    async def work(self, message: Taken[BatchWork]) -> None:
        """Returns once the batch has ended and the message is gone. Left before, the message comes again."""
        first = message.message.state
        state, _ = await self._batches.accepted(first)
        if state.digest == first.digest and not state.final:
            run = _Run(self._batches, self._files, self._executor, self._shares, state, message.deliveries)
            with self._progress.news(state.tenant, state.id, end_only=True) as news:
                await run.to_end(news)
        await message.done()


class _Run:
    """One router's work on one batch."""

    def __init__(
        self,
        batches: BatchLog,
        files: FileStore,
        executor: Executor,
        shares: Shares,
        state: BatchState,
        deliveries: int,
    ) -> None:
        self._batches, self._files, self._executor, self._shares = batches, files, executor, shares
        self._deliveries = deliveries
        self._state = state
        self._seq = 0
        self._done: set[int] = set()
        """Lines that have their result."""
        self._gate = asyncio.Semaphore(LINES_AT_ONCE)
        """Held by a line from its beginning until its result is stored: so what waits for that is bounded."""

    async def to_end(self, news: asyncio.Event) -> None:
        await self._refresh()
        if self._state.status == "validating" and not self._over:
            await self._validate()
        if self._state.status == "in_progress" and not self._over:
            try:
                await self._answer(news)
            except NotFound as error:  # it was deleted in the meantime
                await self._refuse([BatchError("no_file", error.message)])
        state = self._state
        if state.final:
            return
        if state.status == "cancelling":
            await self._end("cancelled")
        elif self._late:
            with suppress(NotFound):  # its file has gone before it: then its lines can't be told one by one
                await self._expire()
            await self._end("expired")
        elif self._stalled:
            await self._refuse([BatchError("stalled", f"{MOST_STALLED} routers ended while they worked on it")])
        else:
            await self._end("completed")

    @property
    def _late(self) -> bool:
        return self._batches.now() >= self._state.expires_s

    @property
    def _stalled(self) -> bool:
        return self._deliveries - self._state.deliveries > MOST_STALLED

    @property
    def _over(self) -> bool:
        return self._late or self._stalled

    async def _validate(self) -> None:
        """Into "in_progress", or "failed"."""
        count, errors = await check(self._lines(), self._state.endpoint)
        if errors:
            await self._refuse(errors)
        else:
            await self._store(begun(self._state, count, self._batches.now()))

    async def _answer(self, news: asyncio.Event) -> None:
        """Until every line has its result, or the batch is to end before."""
        came: asyncio.Queue[BatchLine | BaseException | None] = asyncio.Queue()
        tasks = [asyncio.create_task(self._feed(came)), asyncio.create_task(_look_again(news, came))]
        try:
            while self._state.status == "in_progress" and len(self._done) < self._state.total and not self._late:
                first = await came.get()
                if isinstance(first, BaseException):
                    raise first
                if first is None:
                    await self._refresh()
                    continue
                group, size = [first], len(first.data)
                while size < _GROUP_BYTES and not came.empty():
                    more = came.get_nowait()
                    if not isinstance(more, BatchLine):
                        came.put_nowait(more)
                        break
                    group.append(more)
                    size += len(more.data)
                await self._keep(group)
                for _ in group:
                    self._gate.release()
        finally:
            await cancelled(*tasks)

    async def _feed(self, came: asyncio.Queue[BatchLine | BaseException | None]) -> None:
        try:
            async with asyncio.TaskGroup() as group, aclosing(self._lines()) as read:
                async for number, raw in read:
                    if number in self._done:
                        continue
                    await self._gate.acquire()
                    request = lines.parse(number, raw, self._state.endpoint)
                    if self._shares.full(self._state.tenant):
                        came.put_nowait(BatchLine(number, request.custom_id, 0, _NO_ROOM))
                        continue
                    group.create_task(self._line(request, came))
        except BaseExceptionGroup as failed:
            came.put_nowait(failed.exceptions[0])

    async def _line(self, request: lines.Request, came: asyncio.Queue[BatchLine | BaseException | None]) -> None:
        state = self._state
        name = f"{state.id}-{request.number}"
        asked = Asked(state.tenant, state.key_id, state.endpoint, request.body, name, state.expires_s, state.priority)
        outcome = await self._executor.run(asked, Seen())
        came.put_nowait(BatchLine(request.number, request.custom_id, outcome.status_code, outcome.data))

    async def _expire(self) -> None:
        """What has no answer by now gets none, and says so."""
        group: list[BatchLine] = []
        if self._state.status == "in_progress":
            async for number, raw in self._lines():
                if number not in self._done:
                    request = lines.parse(number, raw, self._state.endpoint)
                    group.append(BatchLine(number, request.custom_id, 0, _LATE))
                if len(group) >= _LATE_AT_ONCE:
                    await self._keep(group)
                    group = []
            if group:
                await self._keep(group)

    async def _keep(self, group: Sequence[BatchLine]) -> None:
        """Stores results, those that another router has stored by now left out."""
        while not self._state.final:
            new = [line for line in group if line.number not in self._done]
            if not new:
                return
            if await self._store(with_lines(self._state, new, self._deliveries), new):
                self._done.update(line.number for line in new)
                return

    async def _refuse(self, errors: Sequence[BatchError]) -> None:
        while not self._state.final:
            if await self._store(refused(self._state, errors, self._batches.now())):
                return

    async def _end(self, status: BatchStatus) -> None:
        """A cancel that came at the last moment still counts."""
        while not self._state.final:
            told: BatchStatus = "cancelled" if self._state.status == "cancelling" else status
            if await self._store(ended(self._state, told, self._batches.now())):
                return

    async def _store(self, state: BatchState, group: Sequence[BatchLine] = ()) -> bool:
        """False: somebody was quicker, and what is known is what that one left."""
        try:
            self._seq = await self._batches.append(state, self._seq, group)
        except Conflict:
            await self._refresh()
            return False
        self._state = state
        return True

    async def _refresh(self) -> None:
        async for seq, entry in self._batches.entries(self._state, self._seq):
            self._done.update(line.number for line in entry.lines)
            self._state, self._seq = entry.state, seq

    async def _lines(self) -> AsyncGenerator[tuple[int, bytes], None]:
        async with aclosing(self._files.content(self._state.tenant, self._state.input_file)) as content:
            async for line in lines.split(content):
                yield line


async def _look_again(news: asyncio.Event, came: asyncio.Queue[BatchLine | BaseException | None]) -> None:
    while True:
        await wait_news(news, LOOK_AGAIN_S)
        came.put_nowait(None)
