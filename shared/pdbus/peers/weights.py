"""Reads versions from param-servers, whole or in part: manifest, meta files, tensors. Nothing unverified gets out."""

from __future__ import annotations

import asyncio
import time
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any, Protocol, TypeAlias

import numpy as np

from pdbus.bus.bus import Bus
from pdbus.context import LONGEST_DEADLINE_S, RequestContext
from pdbus.errors import NotFound
from pdbus.messages.common import Digest
from pdbus.peers.blocks import BlockFetcher, Source, Wanted
from pdbus.subjects import WEIGHT_BLOCKS, WEIGHT_BLOCKS_OF
from pdbus.weights.blocks import (
    DTYPES,
    PACKED_ROW_BYTES,
    Array,
    block_span,
    blocks_of_rows,
    byte_view,
    row_bytes,
    rows_per_block,
    shard_of,
)
from pdbus.weights.history import RETENTION_S, History
from pdbus.weights.layer import META, Tensor, layer_of, meta_tensor
from pdbus.weights.manifest import Manifest, layer_block, root_block, root_layers
from pdbus.weights.packed import Int8Rows, widened
from pdbus.weights.placement import ranked

Progress: TypeAlias = Callable[[int, int], None]
"""(bytes so far, bytes in all)."""

_MANIFESTS_KEPT = 8


class HasHistory(Protocol):
    """A HistoryFollower, as far as a reader needs it."""

    @property
    def history(self) -> History: ...


class BlockReader:
    """Reads the versions of one model. May be used by several tasks at once."""

    def __init__(self, bus: Bus, model: str, follower: HasHistory) -> None:
        self._model = model
        self._follower = follower
        self._fetcher = BlockFetcher(bus, self._sources)
        self._manifests: OrderedDict[Digest, Manifest] = OrderedDict()

    async def manifest(self, root: Digest, ctx: RequestContext) -> Manifest:
        """Raises NotFound for a root that no commit made, Corrupt where its manifest is malformed, DeadlineExceeded."""
        if root in self._manifests:
            self._manifests.move_to_end(root)
            return self._manifests[root]
        if root not in self._follower.history.roots:
            raise NotFound(f"{self._model} has no version {root.hex()[:12]}")
        manifest = await fetch_manifest(self._fetcher, root, ctx)
        self._manifests[root] = manifest
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
        """The named tensors (all but meta files, if none are named), each one array of the checkpoint's shape; those of
        a version in another precision are widened to fp32.

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
            names = [name for name in manifest.tensors if layer_of(name) != META]
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
        return arrays | await asyncio.to_thread(_unpacked, packed, arrays)

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
        arrays = {tensor.name: _room(tensor, wanted) for tensor, wanted in blocks.items()}
        places, wanted = _places(blocks, arrays)
        total, done = sum(array.nbytes for array in arrays.values()), 0

        async def put(digest: Digest, content: memoryview) -> None:
            nonlocal done
            for place in places[digest]:
                place[:] = content
                done += len(content)
            if progress:
                progress(done, total)

        await self._fetcher.fetch(wanted, put, ctx)
        return arrays

    def _sources(self, shard: int) -> Sequence[Source]:
        """The shard's group, whose members hold all of it; then each member by name, its owners first."""
        named = (
            WEIGHT_BLOCKS_OF(model=self._model, server=server)
            for server in ranked(shard, self._follower.history.members)
        )
        return (WEIGHT_BLOCKS(model=self._model, shard=str(shard)), *named)


async def fetch_manifest(fetcher: BlockFetcher, root: Digest, ctx: RequestContext) -> Manifest:
    """The manifest of `root`, each part of it checked against the digest that names it."""
    found: dict[Digest, bytes] = {}

    async def put(digest: Digest, content: memoryview) -> None:
        found[digest] = bytes(content)

    await fetcher.fetch([Wanted(root, root_block(root, 0).shard)], put, ctx)
    layers = [layer_block(name, digest, 0) for name, digest in root_layers(found[root])]
    await fetcher.fetch([Wanted(layer.digest, layer.shard) for layer in layers], put, ctx)
    return Manifest.assemble(found[root], found)


def _room(tensor: Tensor, blocks: range) -> Array:
    """An array for these blocks of the tensor; of bytes [rows, bytes] where it is packed."""
    whole = blocks == range(len(tensor.blocks))
    if not tensor.shape:
        return np.empty((), DTYPES[tensor.dtype])
    step = rows_per_block(tensor.shape, tensor.dtype)
    rows = tensor.shape[0] if whole else min(blocks.stop * step, tensor.shape[0]) - blocks.start * step
    if tensor.dtype in PACKED_ROW_BYTES:
        return np.empty((rows, row_bytes(tensor.shape, tensor.dtype)), np.uint8)
    return np.empty((rows, *tensor.shape[1:]), DTYPES[tensor.dtype])


def _unpacked(tensors: Iterable[Tensor], arrays: Mapping[str, Array]) -> dict[str, Array | Int8Rows]:
    """What the packed rows of these tensors stand for. Slow: call it in a thread."""
    found: dict[str, Array | Int8Rows] = {}
    for tensor in tensors:
        rows = arrays[tensor.name]
        if tensor.dtype == "int8" and len(tensor.shape) == 2:
            found[tensor.name] = Int8Rows.unpacked(rows, tensor.shape[1])
        else:
            found[tensor.name] = widened(tensor.dtype, rows, (len(rows), *tensor.shape[1:]))
    return found


def _places(
    blocks: Mapping[Tensor, range], arrays: Mapping[str, Array]
) -> tuple[Mapping[Digest, list[memoryview]], list[Wanted]]:
    """Where each block's bytes go (an equal block may go to several places), and what to ask for."""
    places: defaultdict[Digest, list[memoryview]] = defaultdict(list)
    wanted = []
    for tensor, chosen in blocks.items():
        content, filled = byte_view(arrays[tensor.name]), 0
        for index in chosen:
            digest = tensor.blocks[index]
            _, size = block_span(tensor.shape, tensor.dtype, index)
            places[digest].append(content[filled : filled + size])
            wanted.append(Wanted(digest, shard_of(tensor.name, index), size))
            filled += size
    return places, wanted
