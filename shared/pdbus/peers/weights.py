"""Reads versions from param-servers, whole or in part: manifest, meta files, tensors. Nothing unverified gets out."""

from __future__ import annotations

import asyncio
import time
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, Protocol, TypeAlias

from pdbus.bus.bus import Bus
from pdbus.context import LONGEST_DEADLINE_S, RequestContext
from pdbus.errors import NotFound
from pdbus.messages.common import Digest
from pdbus.peers.arrays import room, unpacked, wants_of
from pdbus.peers.blocks import BlockFetcher, Source, Wanted
from pdbus.peers.model_cache import ModelCache, Want
from pdbus.subjects import WEIGHT_BLOCKS, WEIGHT_BLOCKS_OF
from pdbus.weights.blocks import PACKED_ROW_BYTES, Array, Run, blocks_of_rows, shard_of
from pdbus.weights.coming import Coming
from pdbus.weights.history import History
from pdbus.weights.layer import Layer, Tensor, is_computed, layer_of, meta_tensor
from pdbus.weights.log_state import RETENTION_S
from pdbus.weights.manifest import Manifest, layer_block, root_block, root_layers
from pdbus.weights.packed import Int8Rows
from pdbus.weights.placement import ranked

Progress: TypeAlias = Callable[[int, int], None]
"""(bytes so far, bytes in all)."""

_MANIFESTS_KEPT = 8
_LAYERS_KEPT = 1024


class HasHistory(Protocol):
    """A HistoryFollower, as far as a reader needs it."""

    @property
    def history(self) -> History: ...


class BlockReader:
    """Reads the versions of one model. May be used by several tasks at once."""

    def __init__(self, bus: Bus, model: str, follower: HasHistory, cache: ModelCache | None = None) -> None:
        """`cache`: where blocks are looked for first, and kept; none: nothing is kept."""
        self._model = model
        self._follower = follower
        self._fetcher = BlockFetcher(bus, self._sources)
        self._cache = cache or ModelCache(None)
        self._manifests: OrderedDict[Digest, Manifest] = OrderedDict()
        self._layers: OrderedDict[Digest, Layer] = OrderedDict()
        self._coming = Coming("int8")

    async def manifest(self, root: Digest, ctx: RequestContext) -> Manifest:
        """Raises NotFound for a root that no commit made, Corrupt where its manifest is malformed, DeadlineExceeded."""
        if root in self._manifests:
            self._manifests.move_to_end(root)
            return self._manifests[root]
        if root not in self._follower.history.roots:
            raise NotFound(f"{self._model} has no version {root.hex()[:12]}")
        manifest = await fetch_manifest(self._fetcher, root, ctx, self._layers)
        self._manifests[root] = manifest
        for layer in manifest.layers:
            self._layers[layer.digest] = layer
            self._layers.move_to_end(layer.digest)
        while len(self._layers) > _LAYERS_KEPT:
            self._layers.popitem(last=False)
        if len(self._manifests) > _MANIFESTS_KEPT:
            self._manifests.popitem(last=False)
        return manifest

    async def meta(self, root: Digest, ctx: RequestContext) -> dict[str, bytes]:
        """The checkpoint's files (config.json, tokenizer.json, …) by name. Raises as `manifest`."""
        manifest = await self.manifest(root, ctx)
        tensors = await self.tensors(root, ctx, [meta_tensor(file) for file in manifest.files])
        return {file: tensors[meta_tensor(file)].tobytes() for file in manifest.files}

    async def tensors(
        self,
        root: Digest,
        ctx: RequestContext,
        names: Collection[str] | None = None,
        *,
        rows: slice | None = None,
        progress: Progress | None = None,
    ) -> dict[str, Array]:
        """The named tensors (all that workers compute with, if none are named), each one array of the checkpoint's
        shape; those of a version in another precision are widened to fp32.

        `rows` (start and stop): only these of the one tensor that is named. They have to begin and end as blocks do.
        Raises as `manifest`, and NotFound for an unknown name."""
        found = await self.stored(root, ctx, names, rows=rows, progress=progress)
        return {
            name: await asyncio.to_thread(array.widened) if isinstance(array, Int8Rows) else array
            for name, array in found.items()
        }

    async def stored(
        self,
        root: Digest,
        ctx: RequestContext,
        names: Collection[str] | None = None,
        *,
        rows: slice | None = None,
        progress: Progress | None = None,
    ) -> dict[str, Any]:
        """As `tensors`, but matrices that the version has in int8 come as Int8Rows (weights/packed.py)."""
        manifest = await self.manifest(root, ctx)
        if names is None:
            names = [name for name in manifest.tensors if is_computed(layer_of(name))]
        tensors = [manifest.tensor(name) for name in names]
        if rows is None:
            blocks = {tensor: range(len(tensor.blocks)) for tensor in tensors}
        else:
            (tensor,) = tensors
            blocks = {tensor: blocks_of_rows(tensor.shape, tensor.dtype, rows)}
        arrays = await self._fetch(blocks, ctx, progress)
        packed = [tensor for tensor in tensors if tensor.dtype in PACKED_ROW_BYTES]
        if not packed:
            return arrays
        return arrays | await asyncio.to_thread(unpacked, packed, arrays)

    def in_int8(self, root: Digest) -> tuple[Digest, Digest] | None:
        """(version in fp32, the one that was made of it in int8), where `root` is one of such two and both can be
        fetched."""
        history = self._follower.history
        source, precision = history.conversions.sources.get(root, (root, "int8"))
        derived = history.derived(source, "int8")
        kept = history.retained(time.time_ns(), RETENTION_S - LONGEST_DEADLINE_S)
        if precision != "int8" or derived not in kept or source not in kept:
            return None
        return source, derived

    def int8_is_coming(self, root: Digest, nbytes: int) -> bool:
        """Whether the one in int8 is being made of it, of `nbytes` in fp32, and is better waited for."""
        return self._coming.is_worth_it(self._follower.history, root, nbytes, time.monotonic())

    async def runs(
        self, root: Digest, ctx: RequestContext, runs: Sequence[Run], *, progress: Progress | None = None
    ) -> list[Array]:
        """Runs of rows of several tensors in fp32 at once, each of whole blocks. Raises as `tensors`."""
        manifest = await self.manifest(root, ctx)
        chosen = []
        for run in runs:
            tensor = manifest.tensor(run.tensor)
            blocks = blocks_of_rows(tensor.shape, tensor.dtype, run.rows)
            chosen.append((tensor, blocks, room(tensor, blocks)))
        await self._bring(wants_of(chosen), ctx, progress)
        return [array for _, _, array in chosen]

    async def blocks(self, tensor: Tensor, indices: Iterable[int], ctx: RequestContext) -> dict[int, memoryview]:
        """Single blocks of a tensor by index. Raises as `manifest`."""
        found: dict[Digest, memoryview] = {}

        async def put(digest: Digest, content: memoryview) -> None:
            found[digest] = memoryview(bytes(content))

        chosen = {index: tensor.blocks[index] for index in indices}
        wanted = [Wanted(digest, shard_of(tensor.name, index)) for index, digest in chosen.items()]
        await self._fetcher.fetch(wanted, put, ctx)
        return {index: found[digest] for index, digest in chosen.items()}

    async def _fetch(
        self, blocks: Mapping[Tensor, range], ctx: RequestContext, progress: Progress | None
    ) -> dict[str, Array]:
        """`blocks`: those that are wanted of each tensor."""
        arrays = {tensor.name: room(tensor, wanted) for tensor, wanted in blocks.items()}
        wants = wants_of((tensor, chosen, arrays[tensor.name]) for tensor, chosen in blocks.items())
        await self._bring(wants, ctx, progress)
        return arrays

    async def _bring(self, wants: Mapping[Digest, Want], ctx: RequestContext, progress: Progress | None) -> None:
        """Fills the places of all that is wanted: from the cache, and what is not there from param-servers."""
        total = sum(want.nbytes for want in wants.values())
        missing = await self._cache.fill(wants.values())
        if missing:
            async with self._cache.turn():
                missing = await self._cache.fill(missing)
                await self._fetch_missing({want.digest: want for want in missing}, total, ctx, progress)
                await self._cache.keep(missing)
        elif progress:
            progress(total, total)
        missed = sum(want.nbytes for want in missing)
        self._cache.count("miss", len(missing), missed)
        self._cache.count("hit", len(wants) - len(missing), total - missed)

    async def _fetch_missing(
        self, missing: Mapping[Digest, Want], total: int, ctx: RequestContext, progress: Progress | None
    ) -> None:
        done = total - sum(want.nbytes for want in missing.values())

        async def put(digest: Digest, content: memoryview) -> None:
            nonlocal done
            for place in missing[digest].places:
                place[:] = content
                done += len(content)
            if progress:
                progress(done, total)

        wanted = [Wanted(want.digest, shard_of(*want.name), len(want.places[0])) for want in missing.values()]
        await self._fetcher.fetch(wanted, put, ctx)

    def _sources(self, shard: int) -> Sequence[Source]:
        """The shard's group, whose members hold all of it; then each member by name, its owners first."""
        named = (
            WEIGHT_BLOCKS_OF(model=self._model, server=server)
            for server in ranked(shard, self._follower.history.members)
        )
        return (WEIGHT_BLOCKS(model=self._model, shard=str(shard)), *named)


async def fetch_manifest(
    fetcher: BlockFetcher, root: Digest, ctx: RequestContext, known: Mapping[Digest, Layer] = MappingProxyType({})
) -> Manifest:
    """The manifest of `root`, each part of it checked against the digest that names it. `known`: layers by digest, of
    which nothing is fetched."""
    found: dict[Digest, bytes] = {}

    async def put(digest: Digest, content: memoryview) -> None:
        found[digest] = bytes(content)

    await fetcher.fetch([Wanted(root, root_block(root, 0).shard)], put, ctx)
    listed = root_layers(found[root])
    blocks = [layer_block(name, digest, 0) for name, digest in listed if digest not in known]
    if blocks:
        await fetcher.fetch([Wanted(layer.digest, layer.shard) for layer in blocks], put, ctx)
    layers = {layer.digest: Layer.decode(found[layer.digest]) for layer in blocks}
    return Manifest.of_layers(listed, {digest: layers.get(digest) or known[digest] for _, digest in listed})
