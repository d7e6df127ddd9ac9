"""Part 0 of an update of several processes: takes the others in, and gathers what they have staged.

    join      a part asks for the terms: transaction, parent, deadline
    staged    it tells the digests of its tensors, once they are durable at their owners

Both may be repeated. How the update ends the change log tells, to all of them alike.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from contextlib import AsyncExitStack
from types import TracebackType
from typing import Self

from pdbus.bus.bus import Bus
from pdbus.canonical import DIGEST_BYTES
from pdbus.client.weights.edits import with_blocks
from pdbus.context import Deadline, RequestContext
from pdbus.errors import Conflict, DeadlineExceeded, InvalidRequest, PdbusError, StaleAttempt, Unavailable
from pdbus.messages.common import Digest
from pdbus.messages.updates import PartJoin, PartStaged, PartTaken, PartTensor, PartTerms
from pdbus.subjects import UPDATE_JOIN, UPDATE_STAGED
from pdbus.weights.layer import Tensor
from pdbus.weights.manifest import Manifest

_ASK_S = 2.0


class Gathering:
    """While entered, answers the other parts of the update that they call `shared`."""

    def __init__(self, bus: Bus, model: str, shared: str, mine: PartJoin, terms: PartTerms, deadline: Deadline) -> None:
        self._bus, self._mine, self._terms, self._deadline = bus, mine, terms, deadline
        self._place = {"model": model, "tx": shared}
        self._incarnations: dict[int, str] = {}
        self._blocks: dict[int, dict[str, dict[int, Digest]]] = {}
        """By part, the blocks of its tensors by index."""
        self._shapes: dict[str, tuple[str, tuple[int, ...]]] = {}
        """(dtype, shape) by tensor."""
        self._complete: set[int] = set()
        self._failure: PdbusError | None = None
        self._news = asyncio.Event()
        self._taken = False
        self._life = AsyncExitStack()

    async def __aenter__(self) -> Self:
        """Raises Conflict where another process is part 0 of an update with this id; DeadlineExceeded where one may be,
        which does not answer."""
        await self._alone()
        async with AsyncExitStack() as life:
            await life.enter_async_context(await self._bus.serve(UPDATE_JOIN(**self._place), self._join))
            await life.enter_async_context(await self._bus.serve(UPDATE_STAGED(**self._place), self._staged))
            self._life = life.pop_all()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._life.aclose()

    async def _alone(self) -> None:
        while True:
            try:
                ctx = RequestContext(self._deadline.within(_ASK_S))
                await self._bus.call(UPDATE_JOIN(**self._place), self._mine, ctx)
                return
            except Unavailable:  # nobody is there
                return
            except DeadlineExceeded:
                self._deadline.check("it was certain that no other process is part 0 of this update")

    def fail(self, error: PdbusError) -> None:
        """`tensors` raises this now."""
        self._failure = self._failure or error
        self._news.set()

    async def tensors(self, own: Mapping[str, Tensor], manifest: Manifest, deadline: Deadline) -> dict[str, Tensor]:
        """Those of all other parts, once each has told all of them.

        Raises InvalidRequest for a tensor that two parts have staged, DeadlineExceeded naming the parts that are late,
        Conflict where one of them was begun anew."""
        others = set(range(1, self._mine.of))
        try:
            async with deadline.timeout():
                while self._complete != others and not self._failure:
                    self._news.clear()
                    await self._news.wait()
        except TimeoutError:
            late = ", ".join(map(str, sorted(others - self._complete)))
            raise DeadlineExceeded(f"part {late} of {self._mine.of} had not staged by the deadline") from None
        if self._failure:
            raise self._failure
        self._taken = True
        return self._merged(own, manifest)

    def _merged(self, own: Mapping[str, Tensor], manifest: Manifest) -> dict[str, Tensor]:
        owners = dict.fromkeys(own, 0)
        merged: dict[str, Tensor] = {}
        for part, tensors in sorted(self._blocks.items()):
            for name, blocks in tensors.items():
                if name in owners:
                    both = f"part {owners[name]} and part {part}"
                    raise InvalidRequest(f"{name} was staged by {both}: each tensor belongs to one", param=name)
                owners[name] = part
                merged[name] = _tensor(name, *self._shapes[name], blocks, manifest.tensors.get(name))
        return merged

    async def _join(self, message: PartJoin, ctx: RequestContext) -> PartTerms:
        if message.part == 0:
            raise Conflict("another process is part 0 of an update with this id")
        mine = self._mine
        theirs = (message.of, message.ref, message.message, message.parent or self._terms.parent)
        if theirs != (mine.of, mine.ref, mine.message, self._terms.parent) or not 0 < message.part < mine.of:
            raise InvalidRequest(
                f"part {message.part} of {message.of} is of another update than part 0: number of parts, ref, message "
                f"and parent have to be the same (here {mine.of}, {mine.ref!r}, {mine.message!r})",
                param="part",
            )
        known = self._incarnations.get(message.part)
        if known is not None and known != message.incarnation:
            if not self._taken:
                self.fail(Conflict(f"part {message.part} was begun anew while the update was open"))
            raise Unavailable("the update with this id that is open is not yours: it ends first")
        if self._taken or self._failure:
            raise Unavailable("the update with this id that is open is ending")
        self._incarnations[message.part] = message.incarnation
        return self._terms

    async def _staged(self, message: PartStaged, ctx: RequestContext) -> PartTaken:
        known = self._incarnations.get(message.part)
        if message.tx != self._terms.tx or known != message.incarnation:
            raise StaleAttempt("part 0 was begun anew: this update is no longer open")
        if message.part not in self._complete:
            told = self._blocks.setdefault(message.part, {})
            for tensor in message.tensors:
                told.setdefault(tensor.name, {}).update(tensor.blocks)
                self._shapes[tensor.name] = (tensor.dtype, tensor.shape)
            if message.last:
                self._complete.add(message.part)
                self._news.set()
        return PartTaken(message.tx)


def told(tensor: Tensor, parent: Tensor | None) -> PartTensor:
    """What of a tensor its part 0 has to know."""
    same = parent.blocks if parent and (parent.dtype, parent.shape) == (tensor.dtype, tensor.shape) else None
    differ = tuple((i, block) for i, block in enumerate(tensor.blocks) if same is None or same[i] != block)
    return PartTensor(tensor.name, tensor.dtype, tensor.shape, differ)


def _tensor(
    name: str, dtype: str, shape: tuple[int, ...], blocks: Mapping[int, Digest], parent: Tensor | None
) -> Tensor:
    """The other way round. Raises InvalidRequest."""
    same = parent if parent and (parent.dtype, parent.shape) == (dtype, shape) else None
    complete = len(blocks) if same is None else len(same.blocks)
    if any(not 0 <= i < complete or len(digest) != DIGEST_BYTES for i, digest in blocks.items()):
        raise InvalidRequest(f"the blocks of {name} do not fit it", param=name)
    if same:
        return with_blocks(same, blocks)
    return Tensor(name, dtype, shape, tuple(blocks[i] for i in sorted(blocks)))
