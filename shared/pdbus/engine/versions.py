"""The versions of a model that writes text, as a worker holds them: pinned by requests while these compute with them.

The next one is built beside those that serve, and shares the layers that did not change.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from types import TracebackType

from pdbus.context import Deadline
from pdbus.engine.loaded import Loaded
from pdbus.engine.sources import Int8Source, WeightSource
from pdbus.engine.version import Pin, Version, load
from pdbus.errors import InvalidRequest
from pdbus.kv.format import PageFormat
from pdbus.messages.common import Digest
from pdbus.model.backend import Backend
from pdbus.model.config import ModelConfig


class Versions(Loaded[Version]):
    """`open_backend` is called in a thread, once, for the first version: what it gives computes all of them, and is
    closed in the end. `on_kept`, `int8`: as in `load`."""

    def __init__(
        self,
        source: WeightSource,
        open_backend: Callable[[ModelConfig], Backend],
        on_change: Callable[[], object] = lambda: None,
        on_kept: Callable[[int, int], object] = lambda blocks, size: None,
        int8: Int8Source | None = None,
    ) -> None:
        super().__init__(on_change)
        self.backend: Backend | None = None
        """None before the first version."""
        self.kv_roots: dict[Digest, Digest] = {}
        """KV-relevant roots of the versions that are or were here: cached pages may outlive their version."""
        self._source, self._int8 = source, int8
        self._open_backend, self._on_kept = open_backend, on_kept
        self._opening: asyncio.Task[Backend] | None = None

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await super().__aexit__(kind, error, trace)
        if self._opening:  # compiling can't be stopped in its middle
            (backend,) = await asyncio.gather(self._opening, return_exceptions=True)
            if not isinstance(backend, BaseException):
                backend.close()

    @property
    def compute_class(self) -> str:
        """Of all its versions; empty before the first."""
        return self.backend.compute_class if self.backend else ""

    @property
    def page_format(self) -> PageFormat | None:
        """Of all its versions; None before the first."""
        return next((version.scope.page_format for version in self._ready.values()), None)

    @property
    def pins(self) -> int:
        return sum(version.pins for version in self._ready.values())

    async def pin(self, root: Digest, deadline: Deadline) -> Pin:
        """Pins the version, after loading it if need be. Raises as `need`."""
        return (await self.need(root, deadline)).pin()

    def _in_use(self, version: Version) -> bool:
        return version.pins > 0

    async def _load(self, root: Digest) -> Version:
        others, progress = [*self._ready.values()], self._loading(root)
        version = await load(root, self._source, others, self._backend_for, progress, self._on_kept, self._int8)
        if self.page_format not in (None, version.scope.page_format):
            raise InvalidRequest(
                f"its KV pages ({version.scope.page_format}) differ from this worker's ({self.page_format})"
            )
        self.kv_roots[root] = version.scope.kv_root
        return version

    async def _backend_for(self, config: ModelConfig) -> Backend:
        if self.backend is None:
            before = self.detail
            self.detail = "preparing the engine (on its first start here it compiles its kernels: some seconds)"
            # It may have been begun for a version that was given up meanwhile.
            if self._opening is None or (self._opening.done() and self._opening.exception()):
                self._opening = asyncio.create_task(asyncio.to_thread(self._open_backend, config))
            self.backend = await asyncio.shield(self._opening)
            self.detail = before
        return self.backend
