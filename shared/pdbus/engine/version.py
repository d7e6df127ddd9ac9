"""One version of the model, ready to compute, and how it is loaded over the bus."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from types import TracebackType
from typing import Self

from pdbus.context import LONGEST_DEADLINE_S, RequestContext
from pdbus.engine.failure import NotYet
from pdbus.engine.sources import Fetch, FetchRuns, Int8Source, Progress, WeightSource
from pdbus.kv.format import StreamFormat
from pdbus.kv.prefix import PrefixScope, group_starts
from pdbus.messages.common import Digest
from pdbus.model.backend import Backend, Builder, Model
from pdbus.model.config import ModelConfig
from pdbus.model.families import config_of, writing
from pdbus.model.memory import give_back
from pdbus.model.parts import NO_CHANGES, Changes, Part, Patch, Tensors, packed_dtypes
from pdbus.model.scope import prefix_scope, stream_scopes
from pdbus.tasks import cancelled
from pdbus.weights.blocks import blocks_of_rows, row_bytes
from pdbus.weights.changes import changed_rows
from pdbus.weights.layer import META, is_computed, layer_of
from pdbus.weights.manifest import Manifest

_FP32_TO_INT8 = 3.7
"""Times as many bytes."""


@dataclass(eq=False)
class Version:
    """One root, ready to compute."""

    root: Digest
    model: Model
    scope: PrefixScope
    """Of its prefix keys, without a salt."""
    manifest: Manifest
    """Of what it knows its layers by: where they were made in int8 of a version in fp32, that one's."""
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
    int8: Int8Source | None = None,
) -> Version:
    """Fetches what none of the `others` holds already, part by part, and builds the version. `backend_for`: what shall
    compute it. `on_kept`: told how many blocks, and bytes, did not have to be fetched.

    Where that computes in int8, a version in fp32 and the one that was made of it in int8 are the same to it, bit by
    bit. It then knows the layers of both by the former's digests, so that they are shared, and fetches what is less:
    the rows in fp32 that changed since one of the `others`, or whole layers in int8. Prefix keys are made from the
    version that was asked for: a router knows no other.

    Raises what `source` does, InvalidRequest for a model that can't be served; NotYet where one of the others serves
    while layers in int8 are being made."""
    ctx = RequestContext.after(LONGEST_DEADLINE_S)
    asked = await source.manifest(root, ctx)
    config = await _config(asked, source, others, ctx)
    backend = await backend_for(config)
    packing = int8 if backend.takes_int8 else None
    pair = packing.in_int8(root) if packing else None
    known = fetched = await source.manifest(pair[0], ctx) if pair else asked
    digests = _digests(known)
    reuse = max(others, key=lambda other: len(digests.items() & other.digests.items()), default=None)
    changes = changed_rows(reuse.manifest, known) if reuse and digests.get(META) == reuse.digests[META] else NO_CHANGES
    if packing and not _are_few(changes, known, reuse):
        nbytes = sum(tensor.nbytes for tensor in _computed(known).values())
        if reuse and not pair and packing.int8_is_coming(root, nbytes):
            raise NotYet
        fetched = await source.manifest(pair[1], ctx) if pair else known
    tensors = _computed(fetched)
    if packed_dtypes(tensors):  # such rows aren't patched: layers of which any changed are built whole
        changes = NO_CHANGES
    digests.pop(META, None)
    begin = partial(backend.begin, config, digests, reuse.model if reuse else None, changes, tensors)
    builder = await asyncio.to_thread(begin)
    fetch: Fetch = packing.stored if packing else source.tensors
    await _fill(builder, partial(fetch, fetched.root, ctx), partial(source.runs, fetched.root, ctx), progress)
    model = await asyncio.to_thread(builder.finish)
    await asyncio.to_thread(give_back)
    on_kept(*_kept(tensors, builder))
    contents = {name: tensor.digest for name, tensor in _computed(asked).items()}
    scope = prefix_scope(config, contents, backend.page_format(config), backend.compute_class)
    starts = group_starts(config.layers, backend.layer_groups)
    return Version(root, model, scope, known, stream_scopes(scope, contents, starts))


def _are_few(changes: Changes, manifest: Manifest, reuse: Version | None) -> bool:
    """Whether all that differs from `reuse` are such rows of it, and these are less in fp32 than their layers in int8.
    True where nothing differs."""
    if reuse is None:
        return False
    same = reuse.digests.items()
    layers = [layer for layer in manifest.layers if is_computed(layer.name) and (layer.name, layer.digest) not in same]
    if not changes.keys() >= {layer.name for layer in layers}:
        return False
    changed = 0
    for run in (run for runs in changes.values() for run in runs):
        tensor = manifest.tensors[run.tensor]
        changed += int(run.rows.stop - run.rows.start) * row_bytes(tensor.shape, tensor.dtype)
    return changed * _FP32_TO_INT8 <= sum(tensor.nbytes for layer in layers for tensor in layer.tensors)


async def _config(
    manifest: Manifest, source: WeightSource, others: Sequence[Version], ctx: RequestContext
) -> ModelConfig:
    """Of a version that has the same files, or from these."""
    meta = _digests(manifest).get(META)
    for other in others:
        if meta == other.digests[META]:
            return other.config
    return writing(config_of(await source.meta(manifest.root, ctx)))


def _digests(manifest: Manifest) -> dict[str, Digest]:
    """By name of its layers that are computed with, and of its files."""
    return {layer.name: layer.digest for layer in manifest.layers if layer.name == META or is_computed(layer.name)}


def _computed(manifest: Manifest) -> Tensors:
    return {name: tensor for name, tensor in manifest.tensors.items() if is_computed(layer_of(name))}


async def _fill(builder: Builder[Model], fetch: Fetch, fetch_runs: FetchRuns, progress: Progress) -> None:
    """Fetches a part while the one before it is packed: no more of them are in memory at once."""
    wanted: list[Part | Patch] = [*builder.patches, *builder.parts]
    total, done = sum(part.nbytes for part in wanted), 0
    packing: asyncio.Task[None] | None = None
    try:
        for part in wanted:
            told = partial(_told, progress, done, total)
            pack = await _fetched(builder, part, fetch, fetch_runs, told)
            if packing:
                await packing
            packing = asyncio.create_task(asyncio.to_thread(pack))
            done += part.nbytes
        if packing:
            await packing
    finally:
        await cancelled(packing)


async def _fetched(
    builder: Builder[Model], part: Part | Patch, fetch: Fetch, fetch_runs: FetchRuns, progress: Progress
) -> Callable[[], None]:
    """What gives the part to the builder, once it is here."""
    if isinstance(part, Patch):
        return partial(builder.patch, part, await fetch_runs(part.runs, progress=progress))
    return partial(builder.add, part, await fetch(tuple(part.shapes), rows=part.rows, progress=progress))


def _kept(tensors: Tensors, builder: Builder[Model]) -> tuple[int, int]:
    """Blocks of the version that the builder did not ask for, and their bytes."""
    blocks = sum(len(tensor.blocks) for tensor in tensors.values())
    size = sum(tensor.nbytes for tensor in tensors.values())
    asked = [(run.tensor, run.rows) for patch in builder.patches for run in patch.runs]
    asked += [(name, part.rows or slice(0, tensors[name].shape[0])) for part in builder.parts for name in part.shapes]
    for name, rows in asked:
        tensor = tensors[name]
        blocks -= len(blocks_of_rows(tensor.shape, tensor.dtype, rows))
        size -= (rows.stop - rows.start) * row_bytes(tensor.shape, tensor.dtype)
    return blocks, size


def _told(progress: Progress, before: int, total: int, done: int, of_part: int) -> None:
    progress(before + done, total)
