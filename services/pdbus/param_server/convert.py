"""Makes a version in another precision: block by block, staged on their owners like any update, then one commit.
Blocks whose rows did not change since an older version are taken from what was made of that.

No more of it is in memory than what is being sent. The same version gives the same blocks wherever it is made, so that
two servers that make it at once disturb each other only by their work.
"""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import AsyncIterator, Iterable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from pdbus.bus.bus import Bus
from pdbus.bus.presence import Fleet
from pdbus.canonical import content_digest
from pdbus.client.weights.commit_point import append_abort, append_commit
from pdbus.client.weights.edits import NewBlock, manifest_blocks
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
from pdbus.weights.blocks import block_count, byte_view, row_bytes, rows_per_block
from pdbus.weights.conversions import Due
from pdbus.weights.layer import Tensor
from pdbus.weights.log_state import RETENTION_S
from pdbus.weights.manifest import Manifest
from pdbus.weights.packed import Floats

_READ_BLOCKS = 32
"""Of the version in fp32, at a time: 8 MB, as a rule."""
_SENT_BYTES = 32 << 20
"""Of the new one: each sending becomes a pack of its own at its owners."""
_NONE = b""
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
    # Blocks of the line's head are in the new version, too: so it has to be the head still when that is committed.
    head = place.follower.history.head(due.ref) if due.ref else due.root
    try:
        manifest = await _made(place, due, head, stager, RequestContext(deadline))
        return await _commit(place, due, head, tx, manifest, deadline)
    except BaseException as error:
        await asyncio.shield(append_abort(place.bus, place.model, tx, str(error) or type(error).__name__))
        raise


async def _made(place: Place, due: Due, head: Digest | None, stager: Stager, ctx: RequestContext) -> Manifest:
    """Once all that it consists of is durable at its owners. What the line's head holds of it is not made again."""
    source = await place.reader.manifest(due.root, ctx)
    config = config_of(await place.reader.meta(due.root, ctx))
    stay, made = plan(config, source.tensors, due.precision)
    older = await _older(place, head, due.precision, ctx)
    tensors, sending = [*stay], list[NewBlock]()
    for one in made:
        digests = dict(enumerate(known_blocks(one, *older)))
        lacking = [index for index, digest in digests.items() if digest is None]
        async for blocks in _blocks(place, one, lacking, ctx):
            digests |= {block.index: block.digest for block in blocks}
            sending += blocks
            if sum(len(block.content) for block in sending) >= _SENT_BYTES:
                await stager.send(sending)
                await stager.let_go()
                sending = []
        tensors.append(Tensor(one.name, one.dtype, one.source.shape, tuple(filter(None, digests.values()))))
    manifest = Manifest.build(tensors)
    if sending:
        await stager.send(sending)
    await stager.send(manifest_blocks(manifest, older[1]), everywhere=True)
    await stager.let_go()
    return manifest


async def _older(place: Place, head: Digest | None, precision: str, ctx: RequestContext) -> tuple[Manifest, Manifest]:
    """A version in fp32 and what was made of it, the line's head. Two that hold nothing where that is not so."""
    history = place.follower.history
    source, made_in = history.conversions.sources.get(head or _NONE, (None, ""))
    if head and source in history.retained(time.time_ns(), RETENTION_S) and made_in == precision:
        return await place.reader.manifest(source, ctx), await place.reader.manifest(head, ctx)
    return Manifest(()), Manifest(())


def known_blocks(made: Made, source: Manifest, older: Manifest) -> list[Digest | None]:
    """The tensor's blocks as `older` has them, which was made of `source`; None where other rows are in them now."""
    new, count = made.source, block_count(made.source.shape, made.dtype)
    before, there = source.tensors.get(new.name), older.tensors.get(made.name)
    of_another = made.name != new.name and made.name in source.tensors  # a head that was not yet tied to the embedding
    if (
        before is None
        or there is None
        or of_another
        or (before.shape, there.shape, there.dtype) != (new.shape, new.shape, made.dtype)
    ):
        return [None] * count
    same = [digest == then for digest, then in zip(new.blocks, before.blocks, strict=True)]
    return [there.blocks[i] if all(same[j] for j in _under(made, range(i, i + 1))) else None for i in range(count)]


def _under(made: Made, blocks: range) -> range:
    """The blocks in fp32 that have the rows of a run of the tensor's blocks. Blocks of the two forms hold different
    runs of rows."""
    step, own = (rows_per_block(made.source.shape, dtype) for dtype in (made.dtype, made.source.dtype))
    rows = min(blocks.stop * step, made.source.shape[0])
    return range(blocks.start * step // own, -(-rows // own))


async def _commit(
    place: Place, due: Due, head: Digest | None, tx: str, manifest: Manifest, deadline: Deadline
) -> Digest:
    layers = changed_layers(manifest, place.store.manifest(head) if head else None)
    author, why = f"param-server {place.server}", f"{due.precision} of {due.root.hex()[:12]}"
    commit = Commit(tx, manifest.root, head, author, why, layers, due.precision, due.ref, source=due.root)
    await append_commit(place.bus, place.model, place.follower, commit, deadline)
    return manifest.root


async def _blocks(
    place: Place, made: Made, indices: Sequence[int], ctx: RequestContext
) -> AsyncIterator[list[NewBlock]]:
    """These blocks of the tensor, in order, some at a time."""
    step, own = (rows_per_block(made.source.shape, dtype) for dtype in (made.dtype, made.source.dtype))
    for run in runs_of(indices, max(1, _READ_BLOCKS * own // step)):
        under = _under(made, run)
        rows = await _rows(place, made.source, under, ctx)
        skipped = run.start * step - under.start * own
        yield await asyncio.to_thread(_packed, made, rows[skipped : skipped + len(run) * step], step, run.start)


def runs_of(indices: Sequence[int], most: int) -> Iterator[range]:
    """Of numbers in ascending order, those that follow one another, so many at most."""
    start = 0
    for at in range(1, len(indices) + 1):
        if at == len(indices) or indices[at] != indices[at - 1] + 1 or at - start == most:
            yield range(indices[start], indices[at - 1] + 1)
            start = at


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
