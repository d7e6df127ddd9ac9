"""One version of the model, ready to compute, and how it is loaded over the bus."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from types import TracebackType
from typing import Protocol, Self

import numpy as np

from pdbus.context import LONGEST_DEADLINE_S, RequestContext
from pdbus.kv.prefix import PrefixScope
from pdbus.messages.common import Digest
from pdbus.model.backend import Backend, Model
from pdbus.model.config import ModelConfig
from pdbus.model.families import config_of, writing
from pdbus.model.scope import prefix_scope
from pdbus.weights.layer import META
from pdbus.weights.manifest import Manifest


class WeightSource(Protocol):
    """Where versions come from: peers/weights.py over the bus."""

    async def manifest(self, root: Digest, ctx: RequestContext) -> Manifest: ...

    async def meta(self, root: Digest, ctx: RequestContext) -> Mapping[str, bytes]: ...

    async def tensors(
        self,
        root: Digest,
        ctx: RequestContext,
        names: Collection[str] | None = None,
        *,
        progress: Callable[[int, int], None] | None = None,
    ) -> Mapping[str, np.ndarray]: ...


@dataclass(eq=False)
class Version:
    """One root, ready to compute."""

    root: Digest
    model: Model
    scope: PrefixScope
    """Of its prefix keys, without a salt."""
    pins: int = 0

    @property
    def config(self) -> ModelConfig:
        return self.model.config

    def salted(self, salt: bytes) -> PrefixScope:
        """The scope of one tenant's prefix keys."""
        return replace(self.scope, salt=salt)

    def pin(self) -> Pin:
        return Pin(self)


class Pin:
    """Keeps a version loaded until `release`, which may be repeated."""

    def __init__(self, version: Version) -> None:
        self.version = version
        self._held = True
        version.pins += 1

    def release(self) -> None:
        if self._held:
            self._held = False
            self.version.pins -= 1

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.release()


async def load(
    root: Digest,
    source: WeightSource,
    others: Sequence[Model],
    backend_for: Callable[[ModelConfig], Awaitable[Backend]],
    progress: Callable[[int, int], None],
) -> Version:
    """Fetches what none of the `others` holds already, and builds the version. `progress` is told (done, total) bytes.
    `backend_for`: what shall compute it.

    Raises what `source` does, and InvalidRequest for a model that can't be served."""
    ctx = RequestContext.after(LONGEST_DEADLINE_S)
    manifest = await source.manifest(root, ctx)
    meta = await source.meta(root, ctx)
    config = writing(config_of(meta))
    backend = await backend_for(config)
    layers = [layer for layer in manifest.layers if layer.name != META]
    digests = {layer.name: layer.digest for layer in layers}
    reuse = max(others, key=lambda model: len(digests.items() & model.digests.items()), default=None)
    arrays = await source.tensors(root, ctx, backend.needed(config, digests, reuse), progress=progress)
    model = await asyncio.to_thread(backend.build, config, digests, arrays, reuse)
    tensors = {tensor.name: tensor.digest for layer in layers for tensor in layer.tensors}
    scope = prefix_scope(config, tensors, backend.page_format(config), backend.compute_class)
    return Version(root, model, scope)
