"""One version of the model, ready to compute, and how it is loaded over the bus."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from types import TracebackType
from typing import Any, Protocol, Self, TypeAlias

import numpy as np

from pdbus.context import LONGEST_DEADLINE_S, RequestContext
from pdbus.kv.prefix import PrefixScope
from pdbus.messages.common import Digest
from pdbus.model.backend import Backend, Builder, Model
from pdbus.model.config import ModelConfig
from pdbus.model.families import config_of, writing
from pdbus.model.memory import give_back
from pdbus.model.scope import prefix_scope
from pdbus.tasks import cancelled
from pdbus.weights.blocks import PACKED_ROW_BYTES
from pdbus.weights.layer import META, layer_of
from pdbus.weights.manifest import Manifest

Progress: TypeAlias = Callable[[int, int], None]
"""(bytes so far, bytes in all)."""


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
        rows: slice | None = None,
        progress: Progress | None = None,
    ) -> Mapping[str, np.ndarray]:
        """`rows`: of the one tensor that is named; a run of whole blocks."""


class Int8Source(Protocol):
    """Versions that were made in int8 once, at a param-server: peers/weights.py."""

    def in_int8(self, root: Digest) -> tuple[Digest, Digest] | None:
        """(version in fp32, the one made of it in int8), where `root` is one of such two and both can be fetched."""

    async def stored(
        self,
        root: Digest,
        ctx: RequestContext,
        names: Collection[str] | None = None,
        *,
        rows: slice | None = None,
        progress: Progress | None = None,
    ) -> Mapping[str, Any]:
        """As WeightSource.tensors; matrices in int8 as Int8Rows."""


Fetch: TypeAlias = Callable[..., Awaitable[Mapping[str, Any]]]
"""As WeightSource.tensors."""


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
    progress: Progress,
    int8: Int8Source | None = None,
) -> Version:
    """Fetches what none of the `others` holds already, part by part, and builds the version. `backend_for`: what shall
    compute it.

    Where that computes in int8, a version in fp32 and the one that was made of it in int8 are the same to it, bit by
    bit. It then fetches the latter's blocks for both, and knows their layers by the former's digests, so that they are
    shared. Prefix keys are made from the version that was asked for: a router knows no other.

    Raises what `source` does, and InvalidRequest for a model that can't be served."""
    ctx = RequestContext.after(LONGEST_DEADLINE_S)
    manifest = await source.manifest(root, ctx)
    meta = await source.meta(root, ctx)
    config = writing(config_of(meta))
    backend = await backend_for(config)
    fetch: Fetch = int8.stored if int8 and backend.takes_int8 else source.tensors
    pair = int8.in_int8(root) if int8 and backend.takes_int8 else None
    known, fetched = [await source.manifest(one, ctx) for one in pair] if pair else [manifest, manifest]
    digests = {layer.name: layer.digest for layer in known.layers if layer.name != META}
    packed = {name: tensor.dtype for name, tensor in fetched.tensors.items() if tensor.dtype in PACKED_ROW_BYTES}
    reuse = max(others, key=lambda model: len(digests.items() & model.digests.items()), default=None)
    builder = await asyncio.to_thread(backend.begin, config, digests, reuse, packed)
    await _fill(builder, partial(fetch, fetched.root, ctx), progress)
    model = await asyncio.to_thread(builder.finish)
    await asyncio.to_thread(give_back)
    tensors = {name: tensor.digest for name, tensor in manifest.tensors.items() if layer_of(name) != META}
    scope = prefix_scope(config, tensors, backend.page_format(config), backend.compute_class)
    return Version(root, model, scope)


async def _fill(builder: Builder[Model], fetch: Fetch, progress: Progress) -> None:
    """Fetches a part while the one before it is packed: no more of them are in memory at once."""
    total, done = sum(part.nbytes for part in builder.parts), 0
    packing: asyncio.Task[None] | None = None
    try:
        for part in builder.parts:
            told = partial(_told, progress, done, total)
            arrays = await fetch(tuple(part.shapes), rows=part.rows, progress=told)
            if packing:
                await packing
            packing = asyncio.create_task(asyncio.to_thread(builder.add, part, arrays))
            done += part.nbytes
        if packing:
            await packing
    finally:
        await cancelled(packing)


def _told(progress: Progress, before: int, total: int, done: int, of_part: int) -> None:
    progress(before + done, total)
