"""The versions that the router knows, and which of them a name means."""

from __future__ import annotations

import asyncio
import logging
from collections import OrderedDict
from collections.abc import Callable, Mapping
from concurrent.futures import Executor
from contextlib import suppress
from functools import partial
from types import TracebackType
from typing import Protocol, Self

from pdbus.context import Deadline, RequestContext
from pdbus.errors import DeadlineExceeded, InvalidRequest, NotFound, PdbusError, Unavailable
from pdbus.messages.common import Digest
from pdbus.router.canary import ref_of
from pdbus.router.encoder_version import EncoderVersion
from pdbus.router.version import AnyVersion, Version, build_version, with_weights
from pdbus.tasks import cancelled
from pdbus.weights.history import History
from pdbus.weights.layer import META, is_computed, layer_of
from pdbus.weights.manifest import Manifest

log = logging.getLogger(__name__)

DEFAULT_REF = "stable"
CONFIRMED_WITHIN_S = 5.0
"""A router that has not confirmed the log's end for so long refuses requests by ref rather than serve an older root."""
FINGERPRINT = "root-"
_MOST_LOADED = 8
_LOAD_S = 60.0
_AGAIN_S = 2.0
_LOOK_S = 1.0


class Follower(Protocol):
    """A HistoryFollower, as far as the router needs it."""

    @property
    def history(self) -> History: ...

    @property
    def confirmed_age_s(self) -> float: ...

    def on_change(self, callback: Callable[[History], object]) -> Callable[[], None]: ...

    async def caught_up(self, deadline: Deadline) -> None: ...


class Reader(Protocol):
    """A BlockReader, as far as the router needs it."""

    async def manifest(self, root: Digest, ctx: RequestContext) -> Manifest: ...

    async def meta(self, root: Digest, ctx: RequestContext) -> dict[str, bytes]: ...


class Models:
    """The versions of one model. Loads each root once, those that refs name as soon as they are named."""

    def __init__(self, model: str, follower: Follower, reader: Reader, executor: Executor) -> None:
        self.model = model
        self._follower = follower
        self._reader = reader
        self._executor = executor
        self._loads: OrderedDict[Digest, asyncio.Task[AnyVersion]] = OrderedDict()
        self._built: tuple[Digest, AnyVersion] | None = None
        """The last version that was built of its files, and the digest of these: most commits change weights only."""
        self._news = asyncio.Event()
        self._looking = asyncio.Lock()

    async def __aenter__(self) -> Self:
        self._stop_following = self._follower.on_change(lambda _: self._news.set())
        self._keeping = asyncio.create_task(self._keep_loaded())
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stop_following()
        await cancelled(self._keeping)
        for load in self._loads.values():
            load.cancel()
        await asyncio.gather(*self._loads.values(), return_exceptions=True)  # failed ones have been told

    @property
    def refs(self) -> Mapping[str, Digest]:
        return self._follower.history.refs

    @property
    def loaded(self) -> tuple[Digest, ...]:
        """Roots that requests can be tokenized for at once."""
        return tuple(root for root, load in self._loads.items() if _succeeded(load))

    def check_name(self, model: str) -> None:
        if model != self.model:
            raise NotFound(f"the model {model[:128]!r} does not exist here; this is {self.model!r}", param="model")

    def ref_for(self, ref: str | None, session: bytes) -> str | None:
        """The ref that serves a session which names `ref`: of those that name none, a canary takes its share."""
        history = self._follower.history
        shares = {name: share for name, share in history.shares.items() if name in history.refs}
        chosen = ref_of(session, shares, DEFAULT_REF) if ref is None and shares else DEFAULT_REF
        return ref if chosen == DEFAULT_REF else chosen

    def named(self, ref: str | None) -> str | None:
        """The ref that `ref` names (`stable` if None); None where it names a root."""
        name = DEFAULT_REF if ref is None else ref
        return name if ref is None or name in self.refs else None

    def exists(self, root: Digest) -> bool:
        """False once it was given up."""
        return root in self._follower.history.roots

    async def check_ref(self, ref: str | None, deadline: Deadline) -> None:
        """Raises as `resolve`. Who has just made a ref may ask for it before this router has read of it: no name is
        refused before the log was read to its end: Unavailable where it can't be."""
        try:
            self.resolve(ref)
            return
        except NotFound:
            within = deadline.within(_LOOK_S)
        read = False
        with suppress(DeadlineExceeded, TimeoutError):
            async with within.timeout(), self._looking:  # one at a time, whoever asks for how many unknown names
                await self._follower.caught_up(within)
                read = True
        try:
            self.resolve(ref)
        except NotFound as error:
            if read:
                raise
            raise Unavailable(f"{error.message}, as far as is known here", retry_after_s=1) from None

    def resolve(self, ref: str | None) -> Digest:
        """The root that a request is pinned to: of a ref (`stable` if None), or of a root's first hex digits.

        Raises NotFound, InvalidRequest for an ambiguous beginning, and Unavailable for a ref while it is not certain
        that no newer entry moved it."""
        history = self._follower.history
        name = DEFAULT_REF if ref is None else ref.removeprefix(FINGERPRINT)
        by_ref = name in history.refs or ref is None
        if by_ref and self._follower.confirmed_age_s > CONFIRMED_WITHIN_S:
            raise Unavailable(
                "it is not certain which version is current: the change log does not answer", retry_after_s=1
            )
        try:
            return history.resolve(name)
        except NotFound:
            if ref is None:
                raise Unavailable("no version of the model is served yet", retry_after_s=2) from None
            raise NotFound(f"the model {self.model!r} has no version or ref {ref[:80]!r}", param="model") from None
        except InvalidRequest as error:
            raise InvalidRequest(error.message, param="model") from None

    def embeds(self, root: Digest) -> bool:
        """Whether it is a loaded version of an encoder."""
        load = self._loads.get(root)
        return load is not None and _succeeded(load) and isinstance(load.result(), EncoderVersion)

    async def get(self, root: Digest, deadline: Deadline) -> Version:
        """Raises what the loading raised (NotFound, Corrupt, …), InvalidRequest for an encoder, DeadlineExceeded."""
        version = await self._any(root, deadline)
        if isinstance(version, EncoderVersion):
            raise InvalidRequest(f"the model {self.model!r} embeds texts: use /v1/embeddings", param="model")
        return version

    async def encoder(self, root: Digest, deadline: Deadline) -> EncoderVersion:
        """As `get`, for an encoder: InvalidRequest for a model that writes text."""
        version = await self._any(root, deadline)
        if isinstance(version, Version):
            raise InvalidRequest(f"the model {self.model!r} writes text: it gives no embeddings", param="model")
        return version

    async def _any(self, root: Digest, deadline: Deadline) -> AnyVersion:
        load = self._load(root)
        if _succeeded(load):
            return load.result()
        done, _ = await asyncio.wait({load}, timeout=max(deadline.remaining_s, 0.0))
        if not done:
            deadline.check("the version's tokenizer had come")
        return load.result()

    def _load(self, root: Digest) -> asyncio.Task[AnyVersion]:
        load = self._loads.get(root)
        if load is None or (load.done() and not _succeeded(load)):
            load = self._loads[root] = asyncio.get_running_loop().create_task(self._read(root))
        self._loads.move_to_end(root)
        return load

    async def _keep_loaded(self) -> None:
        """Loads what refs name, again where that failed, and forgets what nobody has asked for in long."""
        while True:
            self._news.clear()
            wanted = set(self._follower.history.refs.values())
            loads = [self._load(root) for root in wanted]
            for root in [root for root in self._loads if root not in wanted][:-_MOST_LOADED]:
                if self._loads[root].done():
                    del self._loads[root]
            await asyncio.gather(*loads, return_exceptions=True)
            failed = [error for load in loads if (error := _failure(load)) is not None]
            for error in failed:
                log.warning("a version can't be loaded yet: %s", error, exc_info=not isinstance(error, PdbusError))
            with suppress(TimeoutError):
                async with asyncio.timeout(_AGAIN_S if failed else None):
                    await self._news.wait()

    async def _read(self, root: Digest) -> AnyVersion:
        ctx = RequestContext.after(_LOAD_S)
        manifest = await self._reader.manifest(root, ctx)
        tensors = {name: t.digest for name, t in manifest.tensors.items() if is_computed(layer_of(name))}
        files = next((layer.digest for layer in manifest.layers if layer.name == META), b"")
        if self._built and self._built[0] == files:
            return with_weights(self._built[1], root, tensors)
        meta = await self._reader.meta(root, ctx)
        known = [load.result() for load in self._loads.values() if _succeeded(load)]
        build = partial(build_version, root, meta, tensors, known)
        version = await asyncio.get_running_loop().run_in_executor(self._executor, build)
        self._built = files, version
        return version


def _failure(load: asyncio.Task[AnyVersion]) -> BaseException | None:
    return load.exception() if load.done() and not load.cancelled() else None


def _succeeded(load: asyncio.Task[AnyVersion]) -> bool:
    return load.done() and not load.cancelled() and load.exception() is None
