"""Makes a version in another precision: block by block, staged on their owners like any update, then one commit.

No more of it is in memory than what is being sent. The same version gives the same blocks wherever it is made, so that
two servers that make it at once disturb each other only by their work.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncIterator, Iterable
from dataclasses import dataclass

import numpy as np

from pdbus.bus.bus import Bus
from pdbus.bus.presence import Fleet
from pdbus.canonical import content_digest
from pdbus.client.weights.commit_point import append_abort, append_commit
from pdbus.client.weights.edits import NewBlock
from pdbus.client.weights.stager import Stager
from pdbus.context import LONGEST_DEADLINE_S, Deadline, RequestContext, new_id
from pdbus.messages.changelog import Commit
from pdbus.messages.common import Digest
from pdbus.model.convert import Made, converted, plan
from pdbus.model.families import config_of
from pdbus.param_server.commit import changed_layers
from pdbus.param_server.store import BlockStore
from pdbus.peers.history import HistoryFollower
from pdbus.peers.weights import BlockReader
from pdbus.weights.blocks import byte_view, row_bytes, rows_per_block
from pdbus.weights.conversions import Due
from pdbus.weights.layer import Tensor
from pdbus.weights.manifest import Manifest
from pdbus.weights.packed import Floats

_READ_BLOCKS = 32
"""Of the version in fp32, at a time: 8 MB, as a rule."""
_SENT_BYTES = 32 << 20
"""Of the new one: each sending becomes a pack of its own at its owners."""
_LIMIT_S = LONGEST_DEADLINE_S - 10.0


@dataclass(frozen=True, slots=True)
class Place:
    """Where a server stands: what conversions need of it."""

    bus: Bus
    model: str
    server: str
    store: BlockStore
    follower: HistoryFollower
    fleet: Fleet
    reader: BlockReader


async def convert(place: Place, due: Due) -> Digest:
    """Makes the version and commits it; returns its root.

    Raises InvalidRequest where it can't be made, Conflict where the line moved meanwhile, DeadlineExceeded."""
    deadline = Deadline.after(_LIMIT_S)
    tx = new_id()
    stager = Stager(place.bus, place.model, place.follower, place.fleet, tx, deadline, deadline.wall_ns)
    try:
        manifest = await _made(place, due, stager, RequestContext(deadline))
        return await _commit(place, due, tx, manifest, deadline)
    except BaseException as error:
        await asyncio.shield(append_abort(place.bus, place.model, tx, str(error) or type(error).__name__))
        raise


async def _made(place: Place, due: Due, stager: Stager, ctx: RequestContext) -> Manifest:
    """Once all that it consists of is durable at its owners."""
    source = await place.reader.manifest(due.root, ctx)
    config = config_of(await place.reader.meta(due.root, ctx))
    stay, made = plan(config, source.tensors, due.precision)
    tensors = [*stay]
    for one in made:
        digests: list[Digest] = []
        async for blocks in _batches(_blocks(place, one, ctx)):
            digests += [block.digest for block in blocks]
            await stager.send(blocks)
            await stager.let_go()
        tensors.append(Tensor(one.name, one.dtype, one.source.shape, tuple(digests)))
    manifest = Manifest.build(tensors)
    blocks = [
        NewBlock(block.tensor, block.index, block.digest, memoryview(content))
        for block, content in zip(manifest.blocks(), manifest.manifests(), strict=False)  # the manifests come first
    ]
    await stager.send(blocks, everywhere=True)
    await stager.let_go()
    return manifest


async def _commit(place: Place, due: Due, tx: str, manifest: Manifest, deadline: Deadline) -> Digest:
    history = place.follower.history
    head = history.head(due.ref) if due.ref else due.root
    layers = changed_layers(manifest, place.store.manifest(head) if head else None)
    author, why = f"param-server {place.server}", f"{due.precision} of {due.root.hex()[:12]}"
    commit = Commit(tx, manifest.root, head, author, why, layers, due.precision, due.ref, source=due.root)
    await append_commit(place.bus, place.model, place.follower, commit, deadline)
    return manifest.root


async def _batches(blocks: AsyncIterator[list[NewBlock]]) -> AsyncIterator[list[NewBlock]]:
    batch: list[NewBlock] = []
    async for some in blocks:
        batch += some
        if sum(len(block.content) for block in batch) >= _SENT_BYTES:
            yield batch
            batch = []
    if batch:
        yield batch


async def _blocks(place: Place, made: Made, ctx: RequestContext) -> AsyncIterator[list[NewBlock]]:
    """The tensor's blocks in order, some at a time. Blocks of the two forms hold different runs of rows."""
    step = rows_per_block(made.source.shape, made.dtype)
    index, waiting = 0, np.empty((0, *made.source.shape[1:]), np.float32)
    count = len(made.source.blocks)
    for start in range(0, count, _READ_BLOCKS):
        indices = range(start, min(start + _READ_BLOCKS, count))
        waiting = np.concatenate((waiting, await _rows(place, made.source, indices, ctx)))
        ready = len(waiting) if indices.stop == count else len(waiting) // step * step
        if ready:
            blocks = await asyncio.to_thread(_packed, made, waiting[:ready], step, index)
            index, waiting = index + len(blocks), waiting[ready:]
            yield blocks


async def _rows(place: Place, tensor: Tensor, indices: Iterable[int], ctx: RequestContext) -> Floats:
    """These blocks of a tensor in fp32, [rows, …]: from this server's disk, or from whoever has them."""
    here = {index: await asyncio.to_thread(place.store.read, tensor.blocks[index]) for index in indices}
    lacking = [index for index, content in here.items() if content is None]
    fetched = await place.reader.blocks(tensor, lacking, ctx) if lacking else {}
    content = b"".join(content if content is not None else fetched[index] for index, content in here.items())
    place.store.unmap(tensor.blocks[index] for index in here)
    rows = len(content) // max(row_bytes(tensor.shape, tensor.dtype), 1)
    return np.frombuffer(content, "<f4").reshape(rows, *tensor.shape[1:])


def _packed(made: Made, rows: Floats, step: int, index: int) -> list[NewBlock]:
    """Of whole blocks of rows, the first of them block `index`."""
    packed = converted(made.name, rows, made.dtype)
    blocks = []
    for number, start in zip(itertools.count(index), range(0, len(packed), step), strict=False):
        content = byte_view(packed[start : start + step])
        blocks.append(NewBlock(made.name, number, content_digest(content), content))
    return blocks
