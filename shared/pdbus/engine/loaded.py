"""Versions of one model, of whatever kind: loaded in the background when wanted, dropped when nothing needs them.

A version is wanted while the change log wants it (refs and the newest commit), while a request that named it is recent,
and while it is in use.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from abc import abstractmethod
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from types import TracebackType
from typing import Generic, TypeVar

from pdbus.context import Deadline
from pdbus.engine.failure import Failure, NotYet
from pdbus.errors import RootGone
from pdbus.messages.common import Digest
from pdbus.model.memory import give_back
from pdbus.settings import SettingsError
from pdbus.tasks import OwnTask, cancelled
from pdbus.weights.history import History

log = logging.getLogger(__name__)

V = TypeVar("V")

_LINGER_S = 60.0
"""A version that only a request has named stays this long after the last such request."""
_MOST_WISHES = 16
_LOOK_S = 0.5
"""How often what is in use and lingering wishes are looked at."""


@dataclass(eq=False, slots=True)
class _Wish:
    """Of requests, for a version that the log doesn't want. `loaded` is cancelled where it can't be had."""

    loaded: asyncio.Future[None]
    until_s: float = 0.0


class Loaded(OwnTask, Generic[V]):
    """Lives in the event loop; loads one version at a time. Of any kind of model: `_load` makes a version.

    Entered, it loads what `want` names; `detail` says for people how far it is. `on_change`: called when other versions
    are ready than before."""

    def __init__(self, on_change: Callable[[], object]) -> None:
        self._on_change = on_change
        self._ready: dict[Digest, V] = {}
        self._wanted: tuple[Digest, ...] = ()
        self._wishes: dict[Digest, _Wish] = {}
        self._failures: dict[Digest, Failure] = {}  # of wanted ones only
        self._held: set[Digest] = set()
        """Not to be loaded before the next look."""
        self._under_way: tuple[Digest, asyncio.Task[V]] | None = None
        self._changed = asyncio.Event()
        self._any = asyncio.Event()
        self._awaited = False
        """Somebody waits for a first version."""
        self._refused: SettingsError | None = None
        """The settings allow no first version: trying again would change nothing."""
        self.detail = "waiting for a first version"

    @property
    def roots(self) -> tuple[Digest, ...]:
        """Roots that can be served at once."""
        return tuple(self._ready)

    @abstractmethod
    async def _load(self, root: Digest) -> V:
        """Raises whatever it can't be had for; NotYet: it is to be tried again at the next look."""

    def _in_use(self, version: V) -> bool:
        """Whether it has to stay although nothing wants it any more."""
        return False

    def get(self, root: Digest) -> V | None:
        return self._ready.get(root)

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await super().__aexit__(kind, error, trace)
        for wish in self._wishes.values():
            wish.loaded.cancel()

    def want(self, roots: Iterable[Digest]) -> None:
        """Loads these, the first ones first, and drops others as soon as nothing needs them."""
        self._wanted = tuple(roots)
        self._failures = {root: failure for root, failure in self._failures.items() if root in self._wanted}
        self._changed.set()

    def follow(self, history: History) -> None:
        """Wants what the log wants. One that begins anew knows of no version yet: what is loaded goes on serving until
        it does. A version that was given up while it is being loaded is not waited for: nobody keeps its blocks."""
        if history.wanted:
            self.want(history.wanted)
        if self._under_way and self._under_way[0] in history.gone:
            self._under_way[1].cancel()

    async def first(self) -> V:
        """The first version that becomes ready. It stays until it is told here, also where the log has moved on: while
        weights change faster than they are loaded, each would be out of date before it could serve.

        Raises SettingsError where the settings allow none."""
        self._awaited = True
        try:
            while not self._ready:
                self._any.clear()
                ready = asyncio.create_task(self._any.wait())
                try:
                    await asyncio.wait({ready, self._task}, return_when=asyncio.FIRST_COMPLETED)
                finally:
                    await cancelled(ready)
                if self._refused:
                    raise self._refused
                if self._task.done():
                    self._task.result()
            return next(iter(self._ready.values()))
        finally:
            self._awaited = False

    async def need(self, root: Digest, deadline: Deadline) -> V:
        """The version, after loading it if need be. Raises RootGone where that fails or takes longer."""
        if root not in self._ready:
            await self._wish(root, deadline)
        if version := self._ready.get(root):
            return version
        raise RootGone(f"version {root.hex()[:12]} was dropped here")

    def forget(self, root: Digest) -> None:
        """What was made from the root is being deleted everywhere: no request's wish keeps it here any longer."""
        if wish := self._wishes.pop(root, None):
            wish.loaded.cancel()
        self._changed.set()

    async def _wish(self, root: Digest, deadline: Deadline) -> None:
        wish = self._wishes.get(root)
        if wish is None:
            if len(self._wishes) >= _MOST_WISHES:
                raise RootGone(f"version {root.hex()[:12]} is not here, and too many others are asked for")
            wish = self._wishes[root] = _Wish(asyncio.get_running_loop().create_future())
        wish.until_s = time.monotonic() + _LINGER_S
        self._changed.set()
        done, _ = await asyncio.wait([wish.loaded], timeout=max(deadline.remaining_s, 0.0))
        if not done:
            raise RootGone(f"version {root.hex()[:12]} is not loaded here yet")
        if wish.loaded.cancelled():
            raise RootGone(f"version {root.hex()[:12]} can't be loaded here")

    async def _run(self) -> None:
        while True:
            if self._changed.is_set():
                self._held.clear()
            self._changed.clear()
            if self._drop_unwanted(time.monotonic()):
                await asyncio.to_thread(give_back)
            root = self._next(time.monotonic())
            if root is not None:
                await self._load_or_note(root)
                if self._refused:
                    return
                continue
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._changed.wait(), _LOOK_S)
            self._held.clear()

    def _next(self, now_s: float) -> Digest | None:
        for root in (*self._wanted, *self._wishes):
            if root in self._ready or root in self._held:
                continue
            if root not in self._failures or now_s >= self._failures[root].not_before_s:
                return root
        return None

    def _drop_unwanted(self, now_s: float) -> bool:
        """Whether there were any."""
        before = len(self._ready)
        self._wishes = {root: wish for root, wish in self._wishes.items() if wish.until_s > now_s}
        for root, version in list(self._ready.items()):
            if len(self._ready) == 1 and self._awaited:
                break
            if root not in self._wanted and root not in self._wishes and not self._in_use(version):
                del self._ready[root]
                self._on_change()
                log.info("version %s dropped", root.hex()[:12])
        return len(self._ready) < before

    async def _load_or_note(self, root: Digest) -> None:
        try:
            version = await self._load_unless_given_up(root)
        except NotYet:
            self.detail = f"version {root.hex()[:12]} waits for what is made of it"
            self._held.add(root)
            return
        except Exception as error:  # whatever it was: the versions that are here go on serving
            if isinstance(error, SettingsError) and not self._ready:
                self._refused = error
                return
            log.warning("version %s can't be loaded: %s", root.hex()[:12], error)
            self.detail = f"version {root.hex()[:12]} can't be loaded: {error}"
            if root in self._wanted:
                self._failures[root] = Failure.after(self._failures.get(root), time.monotonic())
            if wish := self._wishes.pop(root, None):
                wish.loaded.cancel()
            return
        self.detail = ""
        self._ready[root] = version
        self._on_change()
        self._failures.pop(root, None)
        self._any.set()
        if (wish := self._wishes.get(root)) and not wish.loaded.done():
            wish.loaded.set_result(None)
        log.info("version %s ready", root.hex()[:12])

    async def _load_unless_given_up(self, root: Digest) -> V:
        loading = asyncio.create_task(self._load(root))
        self._under_way = root, loading
        try:
            return await loading
        except asyncio.CancelledError:
            if (me := asyncio.current_task()) and me.cancelling():
                raise
            raise RootGone("it was given up meanwhile") from None
        finally:
            self._under_way = None

    def _loading(self, root: Digest) -> Callable[[int, int], None]:
        """Tells people that it is being loaded; returns what is to be told how far it is: (done, total) bytes."""
        self.detail = f"loading version {root.hex()[:12]}"

        def progress(done_bytes: int, total_bytes: int) -> None:
            self.detail = f"loading version {root.hex()[:12]}: {100 * done_bytes // max(total_bytes, 1)} %"

        return progress
