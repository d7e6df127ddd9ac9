"""One version of the model, ready to compute, and how it is loaded over the bus."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from types import TracebackType
from typing import Protocol, Self, TypeAlias

import numpy as np

from pdbus.context import LONGEST_DEADLINE_S, RequestContext
from pdbus.kv.format import StreamFormat
from pdbus.kv.prefix import PrefixScope, group_starts
from pdbus.messages.common import Digest
from pdbus.model.backend import Backend, Builder, Model
from pdbus.model.config import ModelConfig
from pdbus.model.families import config_of, writing
from pdbus.model.memory import give_back
from pdbus.model.parts import NO_CHANGES, Part, Patch
from pdbus.model.scope import prefix_scope, stream_scopes
from pdbus.tasks import cancelled
from pdbus.weights.blocks import Run, blocks_of_rows
from pdbus.weights.changes import changed_rows
from pdbus.weights.layer import META, Tensor, is_computed, layer_of
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

    async def runs(
        self, root: Digest, ctx: RequestContext, runs: Sequence[Run], *, progress: Progress | None = None
    ) -> Sequence[np.ndarray]:
        """Runs of rows of several tensors at once."""


@dataclass(eq=False)
class Version:
    """One root, ready to compute."""

    root: Digest
    model: Model
    scope: PrefixScope
    """Of its prefix keys, without a salt."""
    manifest: Manifest
    lower: tuple[tuple[int, PrefixScope], ...] = ()
    """(layer, scope of all below it), from the lowest up: where its layers are kept in several groups."""
    pins: int = 0

    @property
    def digests(self) -> Mapping[str, Digest]:
        """Of all its layers, `meta` among them."""
        return {layer.name: layer.digest for layer in self.manifest.layers}

    @property
    def config(self) -> ModelConfig:
        return self.model.config

    def salted(self, salt: bytes) -> PrefixScope:
        """The scope of one tenant's prefix keys."""
        return replace(self.scope, salt=salt)

    @property
    def streams(self) -> StreamFormat:
        """What a pool keeps of the residual stream."""
        return StreamFormat(tuple(layer for layer, _ in self.lower), self.config.hidden_size if self.lower else 0)

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
    others: Sequence[Version],
    backend_for: Callable[[ModelConfig], Awaitable[Backend]],
    progress: Progress,
    on_kept: Callable[[int, int], object] = lambda blocks, size: None,
) -> Version:
    """Fetches what none of the `others` holds already, part by part, and builds the version. `backend_for`: what shall
    compute it. `on_kept`: told how many blocks, and bytes, did not have to be fetched.

    Raises what `source` does, and InvalidRequest for a model that can't be served."""
    ctx = RequestContext.after(LONGEST_DEADLINE_S)
    manifest = await source.manifest(root, ctx)
    digests = {layer.name: layer.digest for layer in manifest.layers if layer.name == META or is_computed(layer.name)}
    reuse = max(others, key=lambda other: len(digests.items() & other.digests.items()), default=None)
    if reuse and digests.get(META) == reuse.digests[META]:
        config = reuse.config
    else:
        config = writing(config_of(await source.meta(root, ctx)))
    backend = await backend_for(config)
    meta = digests.pop(META, None)
    changes = changed_rows(reuse.manifest, manifest) if reuse and meta == reuse.digests[META] else NO_CHANGES
    tensors = {name: tensor for name, tensor in manifest.tensors.items() if is_computed(layer_of(name))}
    begin = partial(backend.begin, config, digests, reuse.model if reuse else None, changes, tensors)
    builder = await asyncio.to_thread(begin)
    await _fill(builder, root, source, ctx, progress)
    model = await asyncio.to_thread(builder.finish)
    await asyncio.to_thread(give_back)
    on_kept(*_kept(tensors, builder))
    contents = {name: tensor.digest for name, tensor in tensors.items()}
    scope = prefix_scope(config, contents, backend.page_format(config), backend.compute_class)
    starts = group_starts(config.layers, backend.layer_groups)
    return Version(root, model, scope, manifest, stream_scopes(scope, contents, starts))


async def _fill(
    builder: Builder[Model], root: Digest, source: WeightSource, ctx: RequestContext, progress: Progress
) -> None:
    """Fetches a part while the one before it is packed: no more of them are in memory at once."""
    wanted: list[Part | Patch] = [*builder.patches, *builder.parts]
    total, done = sum(part.nbytes for part in wanted), 0
    packing: asyncio.Task[None] | None = None
    try:
        for part in wanted:
            told = partial(_told, progress, done, total)
            pack = await _fetched(builder, part, root, source, ctx, told)
            if packing:
                await packing
            packing = asyncio.create_task(asyncio.to_thread(pack))
            done += part.nbytes
        if packing:
            await packing
    finally:
        await cancelled(packing)


async def _fetched(
    builder: Builder[Model],
    part: Part | Patch,
    root: Digest,
    source: WeightSource,
    ctx: RequestContext,
    progress: Progress,
) -> Callable[[], None]:
    """What gives the part to the builder, once it is here."""
    if isinstance(part, Patch):
        return partial(builder.patch, part, await source.runs(root, ctx, part.runs, progress=progress))
    arrays = await source.tensors(root, ctx, tuple(part.shapes), rows=part.rows, progress=progress)
    return partial(builder.add, part, arrays)


def _kept(tensors: Mapping[str, Tensor], builder: Builder[Model]) -> tuple[int, int]:
    """Blocks of the version that the builder did not ask for, and their bytes."""
    blocks = sum(len(tensor.blocks) for tensor in tensors.values())
    size = sum(tensor.nbytes for tensor in tensors.values())
    for run in (run for patch in builder.patches for run in patch.runs):
        blocks -= len(blocks_of_rows(tensors[run.tensor].shape, "fp32", run.rows))
    for part in builder.parts:
        for name in part.shapes:
            rows = part.rows or slice(0, tensors[name].shape[0])
            blocks -= len(blocks_of_rows(tensors[name].shape, "fp32", rows))
        size -= part.nbytes
    return blocks, size - sum(patch.nbytes for patch in builder.patches)


def _told(progress: Progress, before: int, total: int, done: int, of_part: int) -> None:
    progress(before + done, total)
