"""A staging branch: many writers push to it without locks (Hogwild); sealing it makes a version.

The branch is a log, and the log's order is the order in which pushes count. A seal takes what came up to some sequence:
it applies those entries to the head of a line, and commits the result in two phases as any update. The commit says
which stretch of the log went into it, so that the change log alone tells where the next seal begins: whatever dies at
whatever moment, no entry is lost and none is applied twice. Writers go on meanwhile.

Bounds: an entry has at most half a megabyte (larger pushes become several); a branch has 32,768 entries that are not
sealed, and all branches of all models together 4 GB: a push beyond that is refused, with what to do. Sealed entries are
purged once their commit is in the log. A seal holds the blocks that it changes in memory, old and new.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from pdbus.bus.bus import Bus
from pdbus.client.weights.arrays import as_fp32, as_ids
from pdbus.client.weights.commit_point import Ahead
from pdbus.client.weights.terms import Terms, me
from pdbus.client.weights.update import Update
from pdbus.context import Deadline, new_id
from pdbus.errors import Corrupt, InvalidRequest, NotFound, Overloaded, PdbusError
from pdbus.messages.changelog import Sealed
from pdbus.messages.common import Digest
from pdbus.messages.updates import BranchEntry
from pdbus.subjects import ANY, BRANCH
from pdbus.weights.blocks import Array
from pdbus.weights.branch import Change, How, element_entries, row_entries, run_entries
from pdbus.weights.history import History
from pdbus.weights.layer import META, Tensor, layer_of
from pdbus.weights.manifest import Manifest

if TYPE_CHECKING:
    from pdbus.client.weights.weights import Weights

log = logging.getLogger(__name__)

_AT_ONCE = 4
_PUSH_S = 30.0


@dataclass(frozen=True, slots=True)
class Seal:
    """A version that was made of a branch."""

    root: Digest
    seq: int
    """Of its commit in the change log."""
    upto: int
    """The last entry of the branch that is in it."""
    entries: int
    void: int
    """Entries that fit no tensor of the version."""
    rebased: tuple[Digest, ...]
    """Heads that came up on the line meanwhile: the entries were applied anew, to each of them in turn."""


@dataclass(frozen=True, slots=True)
class BranchState:
    name: str
    entries: int
    """That are in the log."""
    sealed: Sealed | None
    """The last stretch that went into a version."""


class Branch:
    """Made by `Weights.branch`. May be used by several tasks; several processes may push and seal."""

    def __init__(self, weights: Weights, bus: Bus, model: str, name: str) -> None:
        self.name = name
        self._weights, self._bus = weights, bus
        self._to = BRANCH(model=model, branch=name)
        self._manifest: Manifest | None = None

    async def push(self, tensor: str, values: Any, *, rows: Any = None, elements: Any = None) -> int:
        """Sets a whole tensor, or rows of it by index, or elements by index into the flattened tensor; each once.

        Of two pushes the later one in the log counts, element by element. Durable when this returns: the sequence of
        its last entry. One that raises may be there in part. Raises InvalidRequest, NotFound (no such tensor),
        Overloaded where the branch is full, Unavailable."""
        return await self._write("set", tensor, values, rows, elements)

    async def add(self, tensor: str, values: Any, *, rows: Any = None, elements: Any = None) -> int:
        """Adds to them, as `push` sets: a gradient step. Sums are exact in the order of the log."""
        return await self._write("add", tensor, values, rows, elements)

    async def seal(
        self,
        *,
        ref: str = "stable",
        message: str = "",
        author: str = "",
        upto: int | None = None,
        timeout_s: float = 300.0,
    ) -> Seal:
        """Makes a version of the head of `ref` and all entries so far, or those up to the sequence `upto`.

        Where the line goes on meanwhile the entries are applied anew to its new head. Raises NotFound where there is
        nothing to seal, Conflict where another seal of the branch came first, InvalidRequest where the result is not
        finite, DeadlineExceeded, Unavailable. The branch is then as it was."""
        deadline = Deadline.after(timeout_s)
        history = await self._weights.history()
        born = (await self._bus.logs.state(self._to)).created
        after, last = history.sealed_upto(self.name, born), await self._bus.logs.last_seq(self._to)
        span = Sealed(self.name, born, after, min(upto or last, last))
        if span.upto <= after:
            await self._bus.logs.purge(self._to, upto=after)  # a sealer may have died before it did
            raise NotFound(f"the branch {self.name} has nothing that is not sealed")
        terms = Terms("", ref, message or f"branch {self.name}", author or me(), sealed=span)
        rebased: list[Digest] = []
        while True:
            deadline.check("the branch was sealed")
            try:
                return await self._seal(replace(terms, tx=new_id()), deadline, tuple(rebased))
            except Ahead as error:
                log.info("the seal of %s is applied anew: %s", self.name, error.message)
                rebased += filter(None, [(await self._weights.history()).head(ref)])

    async def drop(self) -> int:
        """Throws away what is not sealed; returns how many entries. Raises Unavailable."""
        count = (await self._bus.logs.counts(self._to)).get(self._to.name, 0)
        await self._bus.logs.purge(self._to)
        return count

    async def _seal(self, terms: Terms, deadline: Deadline, rebased: tuple[Digest, ...]) -> Seal:
        span = terms.sealed
        assert span
        async with await self._weights.update(terms, deadline) as update:
            entries, void = await self._apply(update, span, deadline)
            done = await update.commit()
        try:
            await self._bus.logs.purge(self._to, upto=span.upto)
        except PdbusError as error:  # the next seal, or a push that finds no room, does it
            log.warning("sealed entries of %s stay for now: %s", self.name, error.message)
        return Seal(done.root, done.seq, span.upto, entries, void, rebased)

    async def _apply(self, update: Update, span: Sealed, deadline: Deadline) -> tuple[int, int]:
        """Stages what the entries make of the update's parent; returns how many there were, and how many were void."""
        blocks: dict[str, dict[int, Array]] = {}
        entries, void = 0, 0
        async for record in self._bus.logs.between(self._to, span.after, span.upto):
            deadline.check("the branch was read")
            entry, entries = record.entry, entries + 1
            try:
                change = Change(entry, update.tensor(entry.tensor))
            except (Corrupt, NotFound, InvalidRequest) as error:
                log.warning("entry %d of the branch %s is void: %s", record.seq, self.name, error.message)
                void += 1
                continue
            known = blocks.setdefault(entry.tensor, {})
            if lacking := [index for index in change.blocks if index not in known]:
                known |= await update.block_arrays(entry.tensor, lacking)
            change.apply(known)
        for name, changed in blocks.items():
            await update.stage_blocks(name, changed)
        return entries, void

    async def _write(self, how: How, name: str, values: Any, rows: Any, elements: Any) -> int:
        entries = _entries(how, await self._tensor(name), values, rows, elements)
        gate = asyncio.Semaphore(_AT_ONCE)

        async def write(entry: BranchEntry) -> int:
            async with gate:
                return await self._append(entry)

        return max(await asyncio.gather(*map(write, entries)), default=0)

    async def _append(self, entry: BranchEntry) -> int:
        deadline = Deadline.after(_PUSH_S)
        try:
            return await self._bus.logs.append(self._to, entry, deadline=deadline)
        except Overloaded:  # a sealer may have died before it had purged what it sealed
            history = await self._weights.history()
            born = (await self._bus.logs.state(self._to)).created
            await self._bus.logs.purge(self._to, upto=history.sealed_upto(self.name, born))
        try:
            return await self._bus.logs.append(self._to, entry, deadline=deadline)
        except Overloaded:
            raise Overloaded(f"the branch {self.name} is full: seal it, or drop it") from None

    async def _tensor(self, name: str) -> Tensor:
        if self._manifest is None:
            history = await self._weights.history()
            self._manifest = await self._weights.manifest(history.head("stable") or history.wanted[0])
        if layer_of(name) == META:
            raise InvalidRequest(f"{name} is a file: branches hold tensors", param=name)
        return self._manifest.tensor(name)


def _entries(how: How, tensor: Tensor, values: Any, rows: Any, elements: Any) -> Iterator[BranchEntry]:
    """Raises InvalidRequest where the values don't fit."""
    new, name = as_fp32(tensor.name, values), tensor.name
    if rows is not None and elements is not None:
        raise InvalidRequest("give rows or elements, not both", param=name)
    if rows is not None:
        ids = as_ids(name, rows, tensor.shape[0] if tensor.shape else 1)
        _check_shape(name, new, (len(ids), *tensor.shape[1:]))
        return row_entries(tensor, how, ids, new)
    if elements is not None:
        ids = as_ids(name, elements, int(np.prod(tensor.shape, dtype=np.int64)))
        _check_shape(name, new, ids.shape)
        return element_entries(tensor, how, ids, new)
    _check_shape(name, new, tensor.shape)
    return run_entries(tensor, how, new)


def _check_shape(name: str, values: Array, shape: tuple[int, ...]) -> None:
    if values.shape != shape:
        raise InvalidRequest(f"values for {name} have shape {shape} here, not {values.shape}", param=name)


async def branch_states(bus: Bus, model: str, history: History) -> tuple[BranchState, ...]:
    """Of all branches of the model. Raises Unavailable."""
    counts = await bus.logs.counts(BRANCH(model=model, branch=ANY))
    entries = {tokens["branch"]: count for name, count in counts.items() if (tokens := BRANCH.tokens(name))}
    sealed = {one.branch: one for one in history.sealed}
    return tuple(BranchState(name, entries.get(name, 0), sealed.get(name)) for name in sorted(entries | sealed))
