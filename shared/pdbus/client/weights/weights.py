"""The weights of one model, as a caller sees them: updates, branches, refs, and what Versions knows."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import replace
from typing import Any

from pdbus.bus.bus import Bus
from pdbus.client.weights.branch import Branch, BranchState, branch_states
from pdbus.client.weights.converting import Converting
from pdbus.client.weights.parts import LeadingUpdate, PartUpdate, check_part, join
from pdbus.client.weights.stager import Stager
from pdbus.client.weights.table import Home, RowTable
from pdbus.client.weights.terms import Committed, Terms, check_ref, me
from pdbus.client.weights.update import Update
from pdbus.client.weights.versions import LOG_S
from pdbus.context import Deadline, new_id
from pdbus.errors import Conflict, InvalidRequest, NotFound
from pdbus.messages.changelog import Forget, LogEntry, Ref
from pdbus.messages.common import Digest
from pdbus.messages.updates import PartJoin
from pdbus.weights.history import History
from pdbus.weights.layer import is_computed, layer_of
from pdbus.weights.log_state import RETENTION_S

STABLE = "stable"
CANARY = "canary"


class Weights(Converting):
    """Follows the model's change log from its first use on; `close` ends that."""

    def __init__(self, bus: Bus, model: str) -> None:
        super().__init__(bus, model)
        self._tables: dict[str, RowTable] = {}

    async def close(self) -> None:
        async with AsyncExitStack() as ending:
            ending.push_async_callback(super().close)
            for table in self._tables.values():
                ending.push_async_callback(table.close)

    def table(self, name: str) -> RowTable:
        """A sparse table, which need not exist yet. Raises InvalidRequest for what can't name one."""
        if name not in self._tables:
            home = Home(self._bus, self._model, self._follower, self._fleet, self._reader, self._ready, self.begin)
            self._tables[name] = RowTable(home, name)
        return self._tables[name]

    @asynccontextmanager
    async def begin(
        self,
        *,
        ref: str = STABLE,
        parent: str | Digest | None = None,
        message: str = "",
        author: str = "",
        timeout_s: float = 120.0,
        tx: str | None = None,
        part: tuple[int, int] = (0, 1),
    ) -> AsyncIterator[Update]:
        """An update on top of the line `ref`, or of `parent` (a ref, a root, or its first digits), which has to be the
        line's head when it is committed. An empty `ref`: the version shall only exist. Leaving without `commit` aborts.

        `timeout_s`, 600 at most: after that anyone may abort it.

        `tx` and `part`, as in (0, 4) to (3, 4): several processes make one update, each of tensors of its own, under an
        id that they agree on; with the same `ref` and `message`. All of their commits return the same, or raise the
        same. If one of them dies, leaves, or is late at the deadline of part 0, nothing comes to exist. An id may be
        used again once all parts have left; `message`, the step say, keeps a straggler of another one out.

        Raises NotFound, InvalidRequest; DeadlineExceeded where the log does not answer or part 0 does not begin,
        Conflict where two do."""
        if ref:
            check_ref(ref)
        await self._ready()
        deadline = Deadline.after(timeout_s)
        # The line's head as of now: an update on top of an older one would only be found to be in vain at its commit.
        await self._follower.caught_up(deadline)
        base = parent if isinstance(parent, bytes) or parent is None else self._follower.history.resolve(parent)
        terms = Terms(new_id(), ref, message, author or me(), base)
        async with await self.update(terms, deadline, tx, part) as update:
            yield update

    async def update(
        self, terms: Terms, deadline: Deadline, shared: str | None = None, part: tuple[int, int] = (0, 1)
    ) -> Update:
        """What `begin` enters: of this process alone, or its part of one. Raises as `begin`."""
        check_part(part)
        if shared is None and part != (0, 1):
            raise InvalidRequest("the parts of an update share an id: `tx`", param="tx")
        deadline_ns = deadline.wall_ns
        mine = PartJoin(*part, new_id(), terms.ref, terms.message, terms.parent)
        if shared is not None and mine.part:
            agreed = await join(self._bus, self._model, shared, mine, deadline)
            terms, deadline_ns = replace(terms, tx=agreed.tx, parent=agreed.parent), agreed.deadline_ns
            deadline = deadline.within(Deadline.from_wire(deadline_ns).remaining_s)
        stager = Stager(self._bus, self._model, self._follower, self._fleet, terms.tx, deadline, deadline_ns)
        base = (self._bus, self._model, self._follower, self._reader, stager, terms, deadline)
        if shared is None:
            return Update(*base)
        if mine.part:
            return PartUpdate(*base, shared=shared, mine=mine)
        return LeadingUpdate(*base, shared=shared, mine=mine, deadline_ns=deadline_ns)

    def branch(self, name: str) -> Branch:
        """A staging branch, which many writers push to without locks. It is there once something was pushed to it.

        Raises InvalidRequest for a name that it can't have."""
        check_ref(name)
        return Branch(self, self._bus, self._model, name)

    async def branches(self) -> tuple[BranchState, ...]:
        """The staging branches that have entries, or were sealed."""
        history = await self.history()
        return await branch_states(self._bus, self._model, history)

    async def push_state_dict(
        self,
        state: Any,
        *,
        before: Mapping[str, Any] | None = None,
        ref: str = STABLE,
        message: str = "",
        timeout_s: float = 120.0,
        tx: str | None = None,
        part: tuple[int, int] = (0, 1),
    ) -> Committed:
        """Commits what of a state dict, or of a torch module's, differs from the head of the line.

        Names are the checkpoint's. Tensors that the version doesn't have (buffers, a tied head) are left out; those of
        the version that `state` lacks stay. `before`: the state that was pushed last: then only the elements that
        differ travel. `tx` and `part`, as for `begin`: of several processes each pushes the tensors that it has.
        Raises as the methods of Update."""
        tensors: Mapping[str, Any] = state.state_dict() if hasattr(state, "state_dict") else state
        async with self.begin(ref=ref, message=message, timeout_s=timeout_s, tx=tx, part=part) as update:
            manifest = await self.manifest(update.parent)
            known = [name for name in tensors if name in manifest.tensors and is_computed(layer_of(name))]
            if not known:
                raise InvalidRequest(
                    "the state has no tensor that this model's checkpoint has: names are the checkpoint's"
                )
            for name in known:
                await update.stage(name, tensors[name], before=(before or {}).get(name))
            return await update.commit()

    async def wait_for_ref(self, ref: str, root: Digest, timeout_s: float) -> bool:
        """Whether `ref` comes to name `root`; False where its line went on to another head first.

        Raises DeadlineExceeded, when no worker of each kind got ready for it in time."""
        await self._ready()
        await self._follower.caught_up(Deadline.after(LOG_S))

        def settled(history: History) -> bool:
            return history.refs.get(ref) == root or history.head(ref) != root

        await self._follower.wait_for(settled, Deadline.after(timeout_s))
        return self._follower.history.refs.get(ref) == root

    async def move_ref(
        self, name: str, to: str | None, *, message: str = "", share: float | None = None, now: bool = False
    ) -> Digest | None:
        """Points a ref to a version, or removes it (None). Returns the version's root.

        The ref follows once workers have the version ready (`wait_for_ref`), so that no request has to wait for them;
        with `now` it doesn't wait either. Raises InvalidRequest for a name that no ref can have, NotFound (also for a
        version that is no longer kept), Conflict where the log moved meanwhile."""
        check_ref(name)
        if share is not None and not 0.0 <= share <= 1.0:
            raise InvalidRequest(f"a share is 0 to 1, not {share}", param="share")
        history = await self.history()
        root = None if to is None else history.resolve(to)
        if root is not None and root not in history.retained(time.time_ns(), RETENTION_S):
            raise NotFound(f"version {root.hex()[:12]} left its last ref too long ago: it is no longer kept")
        if history.refs.get(name) == root and history.shares.get(name) == share and history.head(name) == root:
            return root
        await self._append(LogEntry(ref=Ref(name, root, me(), message, share, now or root is None)))
        return root

    async def rollback(self, ref: str = STABLE, *, message: str = "", now: bool = False) -> Digest:
        """Points a ref to the parent of the version that it names, as `move_ref` does. Raises what that does, and
        InvalidRequest where there is no parent."""
        history = await self.history()
        found = await self.lineage(history.resolve(ref).hex())
        if found.commit.parent is None:
            raise InvalidRequest(f"{ref} names version {found.root.hex()[:12]}, which has no parent")
        parent, why = found.commit.parent, message or f"rollback of {found.root.hex()[:12]}"
        await self.move_ref(ref, parent.hex(), message=why, share=history.shares.get(ref), now=now)
        return parent

    async def canary(self, to: str | None, share: float) -> Digest | None:
        """Gives a share of the sessions that name no ref another version; None ends it. Raises as `move_ref`."""
        return await self.move_ref(CANARY, to, message=f"{share:.0%} of the sessions", share=share)

    async def forget(self, roots: Sequence[Digest] | None = None) -> tuple[Digest, ...]:
        """Gives up versions at once, whatever the rollback window: all that no ref wants, or these.

        Returns those that are gone. Raises Conflict where one of `roots` is wanted."""
        history = await self.history()
        wanted = set(history.wanted)
        chosen = tuple(root for root in history.roots if root not in wanted) if roots is None else tuple(roots)
        if named := [root for root in chosen if root in wanted]:
            raise Conflict(f"version {named[0].hex()[:12]} is in use: a ref names it, or will")
        if chosen:
            await self._append(LogEntry(forget=Forget(chosen, me())))
        return chosen
