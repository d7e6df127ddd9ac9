"""An update that several processes make together, each of its own tensors: committed as one, or not at all.

Each stages its blocks at their owners itself. Part 0 gathers the others' digests over the bus (gathering.py) and
appends the one commit. What becomes of the transaction the change log says, and all parts go by that: a part that fails
or leaves appends the abort, and so does whoever sees the deadline pass; the first end in the log counts.
"""

from __future__ import annotations

import asyncio
import random
from abc import abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from contextlib import AsyncExitStack
from types import TracebackType
from typing import Any, Self

from pdbus.backoff import backoff_s
from pdbus.bus.bus import Bus
from pdbus.client.weights.commit_point import abort_error
from pdbus.client.weights.edits import NewBlock
from pdbus.client.weights.gathering import Gathering, told
from pdbus.client.weights.terms import Committed
from pdbus.client.weights.update import Update
from pdbus.context import Deadline, RequestContext
from pdbus.errors import Conflict, DeadlineExceeded, InvalidRequest, PdbusError, Unavailable
from pdbus.messages.changelog import NOTHING_CHANGED, Ended
from pdbus.messages.updates import PartJoin, PartStaged, PartTensor, PartTerms
from pdbus.subjects import UPDATE_JOIN, UPDATE_STAGED
from pdbus.weights.history import History
from pdbus.weights.layer import Tensor

_ASK_S = 5.0
_PING_S = 2.0
_GONE_S = 5.0
"""Without a word from part 0 for so long, the others give up."""
_SETTLE_S = 10.0
"""Beyond the deadline, to read in the log how it ended."""
_MOST_BLOCKS = 8192
"""In one message."""


def check_part(part: tuple[int, int]) -> None:
    """Raises InvalidRequest for what is no (part, of how many)."""
    number, of = part
    if not 0 <= number < of <= 1024:
        raise InvalidRequest(
            f"part {number} of {of}: parts are counted from 0, and there are at most 1024", param="part"
        )


async def join(bus: Bus, model: str, shared: str, mine: PartJoin, deadline: Deadline) -> PartTerms:
    """The terms that part 0 has for the update `shared`; waits for it to begin. Raises InvalidRequest where it has
    begun another one, DeadlineExceeded where it doesn't begin."""
    rng, retries = random.Random(), 0  # noqa: S311 - spreads retries
    while True:
        try:
            ctx = RequestContext(deadline.within(_ASK_S))
            return await bus.call(UPDATE_JOIN(model=model, tx=shared), mine, ctx)
        except (Unavailable, DeadlineExceeded):
            retries += 1
            wait_s = min(backoff_s(retries, rng), 0.5)
            if deadline.remaining_s <= wait_s:
                raise DeadlineExceeded(f"part 0 of the update {shared} did not begin in time") from None
            await asyncio.sleep(wait_s)


class SharedUpdate(Update):
    """What all parts have in common: the log's word on the end is the word of each of them."""

    async def commit(self) -> Committed:
        """As of an update of one process: all parts get the same, or raise the same. Raises also InvalidRequest, naming
        the tensor that two parts have staged."""
        try:
            return await self._commit_together()
        except PdbusError as error:
            await self._abort(error.message, error.code)
            ended = await self._end()
            if ended is None:
                raise
            return self._outcome(ended)

    async def _take(self, tensor: Tensor, blocks: Sequence[NewBlock]) -> int:
        """Servers say only that a transaction has ended; the log says why."""
        try:
            return await super()._take(tensor, blocks)
        except Conflict:
            ended = await self._end()
            if ended is None:
                raise
            self._ended = True
            raise abort_error(ended) from None

    @abstractmethod
    async def _commit_together(self) -> Committed: ...

    def _outcome(self, ended: Ended) -> Committed:
        """Raises what the abort says."""
        self._ended = True
        if ended.root:
            return self._done(ended.root, ended.seq)
        if ended.code == NOTHING_CHANGED:
            return self._done(self.parent, self._follower.history.roots[self.parent].at.seq)
        raise abort_error(ended)

    async def _end(self) -> Ended | None:
        """As the log has it now; None where it can't be read."""
        try:
            await self._follower.caught_up(Deadline.after(_SETTLE_S))
        except PdbusError:
            return None
        return self._follower.history.end_of(self._terms.tx)


class LeadingUpdate(SharedUpdate):
    """Part 0."""

    def __init__(self, *base: Any, shared: str, mine: PartJoin, deadline_ns: int) -> None:
        super().__init__(*base)
        self._shared, self._mine, self._deadline_ns = shared, mine, deadline_ns
        self._life = AsyncExitStack()

    async def __aenter__(self) -> Self:
        await super().__aenter__()
        terms = PartTerms(self._terms.tx, self.parent, self._deadline_ns)
        async with AsyncExitStack() as life:
            self._gathering = Gathering(self._bus, self._model, self._shared, self._mine, terms, self._deadline)
            life.callback(self._follower.on_change(self._look))
            await life.enter_async_context(self._gathering)
            self._life = life.pop_all()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            await super().__aexit__(kind, error, trace)
        finally:
            await self._life.aclose()

    async def _commit_together(self) -> Committed:
        await self._stager.settle()
        theirs = await self._gathering.tensors(self._tensors, self._manifest, self._deadline)
        return await self._commit({**self.tensors, **theirs})

    def _look(self, history: History) -> None:
        ended = history.end_of(self._terms.tx)
        if ended and not ended.root:
            self._gathering.fail(abort_error(ended))


class PartUpdate(SharedUpdate):
    """Part 1 and those after it."""

    def __init__(self, *base: Any, shared: str, mine: PartJoin) -> None:
        super().__init__(*base)
        self._mine = mine
        self._to = UPDATE_STAGED(model=self._model, tx=shared)

    async def __aenter__(self) -> Self:
        """Raises DeadlineExceeded where this process doesn't get to know the parent in time."""
        await self._follower.wait_for(lambda history: self._terms.parent in history.roots, self._deadline)
        return await super().__aenter__()

    async def _commit_together(self) -> Committed:
        await self._stager.settle()
        messages = list(_messages(told(new, self._manifest.tensors.get(name)) for name, new in self._tensors.items()))
        for index, tensors in enumerate(messages):
            await self._tell(tensors, last=index == len(messages) - 1)
        while not (ended := self._follower.history.end_of(self._terms.tx)):
            self._deadline.check("the update was committed")
            try:
                await self._follower.wait_for(
                    lambda history: history.end_of(self._terms.tx), self._deadline.within(_PING_S)
                )
            except DeadlineExceeded:
                await self._tell((), last=True)
        return self._outcome(ended)

    async def _tell(self, tensors: tuple[PartTensor, ...], *, last: bool) -> None:
        """Raises Unavailable where part 0 is gone, StaleAttempt where it was begun anew."""
        mine = self._mine
        message = PartStaged(self._terms.tx, mine.part, mine.incarnation, tensors, last)
        rng, retries, patience = random.Random(), 0, self._deadline.within(_GONE_S)  # noqa: S311 - spreads retries
        while self._follower.history.is_open(self._terms.tx):
            try:
                await self._bus.call(self._to, message, RequestContext(patience))
                return
            except (Unavailable, DeadlineExceeded):
                retries += 1
                wait_s = min(backoff_s(retries, rng), 0.5)
                if patience.remaining_s <= wait_s:
                    self._deadline.check("part 0 took what this part had staged")
                    raise Unavailable(f"part 0 of {mine.of} is gone") from None
                await asyncio.sleep(wait_s)


def _messages(tensors: Iterable[PartTensor]) -> Iterator[tuple[PartTensor, ...]]:
    """At least one."""
    some: list[PartTensor] = []
    room = _MOST_BLOCKS
    for tensor in tensors:
        for start in range(0, max(len(tensor.blocks), 1), _MOST_BLOCKS):
            blocks = tensor.blocks[start : start + _MOST_BLOCKS]
            if some and len(blocks) + 1 > room:
                yield tuple(some)
                some, room = [], _MOST_BLOCKS
            some.append(PartTensor(tensor.name, tensor.dtype, tensor.shape, blocks))
            room -= len(blocks) + 1
    yield tuple(some)
