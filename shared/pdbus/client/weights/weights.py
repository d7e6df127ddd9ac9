"""The weights of one model, as a caller sees them: updates, refs, versions and where they come from."""

from __future__ import annotations

import asyncio
import contextlib
import getpass
import re
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

from pdbus.bus.bus import Bus
from pdbus.bus.fleet_table import DEAD_AFTER_S
from pdbus.bus.presence import Fleet
from pdbus.client.weights.converting import asked_conversion
from pdbus.client.weights.diff import TensorDiff, tensor_diffs
from pdbus.client.weights.stager import Stager
from pdbus.client.weights.update import Committed, Terms, Update
from pdbus.context import Deadline, RequestContext, new_id
from pdbus.errors import Conflict, DeadlineExceeded, InvalidRequest, NotFound, Unavailable
from pdbus.messages.changelog import Convert, Forget, LogEntry, Ref
from pdbus.messages.common import Digest
from pdbus.peers.history import HistoryFollower
from pdbus.peers.weights import BlockReader
from pdbus.subjects import CHANGELOG
from pdbus.weights.history import RETENTION_S, History, Version
from pdbus.weights.layer import META, layer_of
from pdbus.weights.manifest import Manifest

STABLE = "stable"
CANARY = "canary"
_LOG_S = 10.0
_REF_NAME = re.compile(r"(?!root-|[0-9a-f]{6,64}$)[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
"""Nothing that `MODEL@NAME` could take for a version."""


class Weights:
    """Follows the model's change log from its first use on; `close` ends that."""

    def __init__(self, bus: Bus, model: str) -> None:
        self._bus, self._model = bus, model
        self._follower = HistoryFollower(bus, model)
        self._fleet = Fleet(bus)
        self._reader = BlockReader(bus, model, self._follower)
        self._life = AsyncExitStack()
        self._starting = asyncio.Lock()
        self._started = False

    async def close(self) -> None:
        await self._life.aclose()

    @asynccontextmanager
    async def begin(
        self,
        *,
        ref: str = STABLE,
        parent: str | Digest | None = None,
        message: str = "",
        author: str = "",
        timeout_s: float = 120.0,
    ) -> AsyncIterator[Update]:
        """An update on top of the line `ref`, or of `parent` (a ref, a root, or its first digits), which has to be the
        line's head when it is committed. An empty `ref`: the version shall only exist. Leaving without `commit` aborts.

        `timeout_s`, 600 at most: after that anyone may abort it. Raises NotFound, InvalidRequest."""
        if ref:
            _check_ref(ref)
        await self._ready()
        deadline = Deadline.after(timeout_s)
        base = parent if isinstance(parent, bytes) or parent is None else self._follower.history.resolve(parent)
        terms = Terms(new_id(), ref, message, author or _me(), base)
        stager = Stager(self._bus, self._model, self._follower, self._fleet, terms.tx, deadline)
        async with Update(self._bus, self._model, self._follower, self._reader, stager, terms, deadline) as update:
            yield update

    async def push_state_dict(
        self,
        state: Any,
        *,
        before: Mapping[str, Any] | None = None,
        ref: str = STABLE,
        message: str = "",
        timeout_s: float = 120.0,
    ) -> Committed:
        """Commits what of a state dict, or of a torch module's, differs from the head of the line.

        Names are the checkpoint's. Tensors that the version doesn't have (buffers, a tied head) are left out; those of
        the version that `state` lacks stay. `before`: the state that was pushed last: then only the elements that
        differ travel. Raises as the methods of Update."""
        tensors: Mapping[str, Any] = state.state_dict() if hasattr(state, "state_dict") else state
        async with self.begin(ref=ref, message=message, timeout_s=timeout_s) as update:
            manifest = await self.manifest(update.parent)
            known = [name for name in tensors if name in manifest.tensors and layer_of(name) != META]
            if not known:
                raise InvalidRequest(
                    "the state has no tensor that this model's checkpoint has: names are the checkpoint's"
                )
            for name in known:
                await update.stage(name, tensors[name], before=(before or {}).get(name))
            return await update.commit()

    async def history(self) -> History:
        """The log, folded, as it is now."""
        await self._ready()
        await self._follower.caught_up(Deadline.after(_LOG_S))
        return self._follower.history

    async def wait_for_ref(self, ref: str, root: Digest, timeout_s: float) -> bool:
        """Whether `ref` comes to name `root`; False where its line went on to another head first.

        Raises DeadlineExceeded, when no worker of each kind got ready for it in time."""
        await self._ready()
        await self._follower.caught_up(Deadline.after(_LOG_S))

        def settled(history: History) -> bool:
            return history.refs.get(ref) == root or history.head(ref) != root

        await self._follower.wait_for(settled, Deadline.after(timeout_s))
        return self._follower.history.refs.get(ref) == root

    async def resolve(self, name: str) -> Version:
        """The version that a ref, a root or its first digits name. Raises NotFound, InvalidRequest."""
        history = await self.history()
        return history.roots[history.resolve(name)]

    async def manifest(self, root: Digest) -> Manifest:
        await self._ready()
        return await self._reader.manifest(root, RequestContext.after(_LOG_S))

    async def diff(self, old: str, new: str) -> tuple[TensorDiff, ...]:
        """The tensors that differ between two versions, in the order of layers. Raises as `resolve`."""
        before, after = [await self.manifest((await self.resolve(name)).root) for name in (old, new)]
        return tensor_diffs(before, after)

    async def move_ref(
        self, name: str, to: str | None, *, message: str = "", share: float | None = None, now: bool = False
    ) -> Digest | None:
        """Points a ref to a version, or removes it (None). Returns the version's root.

        The ref follows once workers have the version ready (`wait_for_ref`), so that no request has to wait for them;
        with `now` it doesn't wait either. Raises InvalidRequest for a name that no ref can have, NotFound (also for a
        version that is no longer kept), Conflict where the log moved meanwhile."""
        _check_ref(name)
        if share is not None and not 0.0 <= share <= 1.0:
            raise InvalidRequest(f"a share is 0 to 1, not {share}", param="share")
        history = await self.history()
        root = None if to is None else history.resolve(to)
        if root is not None and root not in history.retained(time.time_ns(), RETENTION_S):
            raise NotFound(f"version {root.hex()[:12]} left its last ref too long ago: it is no longer kept")
        if history.refs.get(name) == root and history.shares.get(name) == share and history.head(name) == root:
            return root
        await self._append(LogEntry(ref=Ref(name, root, _me(), message, share, now or root is None)))
        return root

    async def rollback(self, ref: str = STABLE, *, message: str = "", now: bool = False) -> Digest:
        """Points a ref to the parent of the version that it names, as `move_ref` does. Raises what that does, and
        InvalidRequest where there is no parent."""
        history = await self.history()
        version = history.roots[history.resolve(ref)]
        if version.commit is None or version.commit.parent is None:
            raise InvalidRequest(f"{ref} names version {version.root.hex()[:12]}, which has no parent")
        parent, why = version.commit.parent, message or f"rollback of {version.root.hex()[:12]}"
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
            await self._append(LogEntry(forget=Forget(chosen, _me())))
        return chosen

    async def convert(self, name: str, precision: str, *, ref: str | None = None, follow: bool = False) -> Convert:
        """Asks the param-servers for a version in another precision (fp16, bf16, int8, fp8), to head the line `ref`:
        by default that of `name` with the precision, such as `stable-int8`; none where `name` is no ref. With `follow`,
        now and whenever the line `name` has another head. Raises as `resolve`."""
        asked = asked_conversion(await self.history(), name, precision, ref, follow, _me())
        if asked.ref:
            _check_ref(asked.ref)
        await self._append(LogEntry(convert=asked))
        return asked

    async def converted(self, root: Digest, precision: str, timeout_s: float) -> Digest:
        """The version that was made of `root`, as soon as it is there. Raises DeadlineExceeded."""
        await self._ready()
        deadline = Deadline.after(timeout_s)
        await self._follower.wait_for(lambda history: history.derived(root, precision) is not None, deadline)
        return self._follower.history.conversions.made[root, precision]

    async def _append(self, entry: LogEntry) -> None:
        deadline = Deadline.after(_LOG_S)
        to, expected, message_id = CHANGELOG(model=self._model), self._follower.seq, new_id()
        try:
            await self._bus.logs.append(to, entry, expected_seq=expected, message_id=message_id, deadline=deadline)
        except Conflict:
            raise Conflict("the change log moved at the same time: look at it, and try again") from None
        await self._follower.caught_up(deadline)

    async def _ready(self) -> None:
        async with self._starting:
            if self._started:
                return
            async with AsyncExitStack() as life:
                await self._bus.logs.ensure()
                await life.enter_async_context(self._follower)
                await life.enter_async_context(self._fleet)
                await self._follower.caught_up(Deadline.after(_LOG_S))
                if not self._follower.history.seq:
                    raise Unavailable(f"there is no model {self._model} on this bus")
                await self._hear_of_all()
                self._life = life.pop_all()
            self._started = True

    async def _hear_of_all(self) -> None:
        """Returns once each member has been heard of, or must be taken for dead: updates go to those that live."""
        members = set(self._follower.history.members)

        def heard(fleet: Fleet) -> bool:
            return members <= {card.id for card in fleet.live("param_server")}

        with contextlib.suppress(DeadlineExceeded, TimeoutError):
            await self._fleet.wait_for(heard, Deadline.after(DEAD_AFTER_S))


def _check_ref(name: str) -> None:
    if not _REF_NAME.fullmatch(name):
        raise InvalidRequest(
            f"{name!r} can't name a ref: 1 to 64 of A-Z a-z 0-9 . _ -, first a letter or digit, and unlike a version",
            param="ref",
        )


def _me() -> str:
    try:
        return getpass.getuser()
    except OSError:  # a container's user may have no name
        return "somebody"
