"""Makes a sparse table: some blocks at a time, so that it may be larger than the memory of who makes it. Drops one."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractAsyncContextManager
from typing import Any, TypeAlias

import numpy as np

from pdbus.bus.bus import Bus
from pdbus.canonical import content_digest
from pdbus.client.weights.arrays import as_fp32
from pdbus.client.weights.edits import NewBlock
from pdbus.client.weights.terms import Committed
from pdbus.client.weights.update import Update
from pdbus.context import new_id
from pdbus.errors import Conflict, InvalidRequest, NotFound
from pdbus.messages.common import Digest
from pdbus.messages.rows import RowsUpdate
from pdbus.subjects import ToEvent
from pdbus.weights.blocks import Array, block_count, block_span, byte_view, cut, rows_per_block
from pdbus.weights.layer import Tensor
from pdbus.weights.tables import LINE, Seal, Table, check_shape, layer_name

Init: TypeAlias = "Callable[[int, int], Any] | Any | None"

_DTYPE = "fp32"
_BLOCKS_AT_ONCE = 64
_LONGEST_S = 600.0


async def create(
    bus: Bus,
    begin: Callable[..., AbstractAsyncContextManager[Update]],
    to: ToEvent[RowsUpdate],
    name: str,
    shape: tuple[int, int],
    init: Init,
    message: str,
) -> Committed:
    """Commits the table on its line. Raises as `RowTable.create`."""
    check_shape(*shape)
    layer = layer_name(name)
    said = message or f"table {name} of {shape[0]} rows"
    async with begin(ref=LINE, message=said, timeout_s=_LONGEST_S) as update:
        if layer in update.tensors:
            raise Conflict(f"there is a table {name} already", param="name")
        log, seq = await bus.logs.identity(to), await bus.logs.last_seq(to)
        if init is None:
            digests = await _send_zeros(update, layer, shape)
        else:
            digests = await _send_chunks(update, layer, shape, init)
        table = Table(name, Tensor(layer, _DTYPE, shape, digests), Seal(new_id(), log, seq))
        update.put_layer(layer, table.tensors)
        return await update.commit()


async def drop(begin: Callable[..., AbstractAsyncContextManager[Update]], name: str, message: str) -> Committed:
    """Commits a version without the table, on its line. Raises NotFound, Conflict."""
    async with begin(ref=LINE, message=message or f"table {name} dropped") as update:
        if (layer := layer_name(name)) not in update.tensors:
            raise NotFound(f"there is no table {name}")
        update.put_layer(layer, ())
        return await update.commit()


async def _send_zeros(update: Update, layer: str, shape: tuple[int, int]) -> tuple[Digest, ...]:
    """Two blocks at most differ: a whole one and the last. Every server gets those, as each has shards of them."""
    blocks: dict[int, NewBlock] = {}
    digests = []
    for index in range(block_count(shape, _DTYPE)):
        size = block_span(shape, _DTYPE, index)[1]
        if size not in blocks:
            content = memoryview(bytes(size))
            blocks[size] = NewBlock(layer, index, content_digest(content), content)
        digests.append(blocks[size].digest)
    await update.send_for_good(list(blocks.values()), everywhere=True)
    return tuple(digests)


async def _send_chunks(update: Update, layer: str, shape: tuple[int, int], init: Init) -> tuple[Digest, ...]:
    digests: list[Digest] = []
    for chunk in _chunks(shape, init):
        first = len(digests)
        blocks = [NewBlock(layer, first + i, content_digest(part), part) for i, part in enumerate(cut(chunk))]
        digests += [block.digest for block in blocks]
        alike: dict[Digest, NewBlock] = {}
        repeated = [b for b in blocks if alike.setdefault(b.digest, b) is not b]
        if repeated:  # an equal block has shards of several owners
            await update.send_for_good(list({b.digest: b for b in repeated}.values()), everywhere=True)
        await update.send_for_good(blocks)
    return tuple(digests)


def _chunks(shape: tuple[int, int], init: Init) -> Iterator[Array]:
    rows, width = shape
    step = _BLOCKS_AT_ONCE * rows_per_block(shape, _DTYPE)
    array: Any = init
    if not callable(init) and tuple(np.shape(array)) != shape:
        raise InvalidRequest(f"the table has shape {shape}, not {tuple(np.shape(array))}", param="init")
    for first in range(0, rows, step):
        count = min(step, rows - first)
        given = init(first, count) if callable(init) else array[first : first + count]
        chunk = as_fp32("init", given)
        if chunk.shape != (count, width):
            raise InvalidRequest(f"rows {first} on have shape {(count, width)}, not {chunk.shape}", param="init")
        yield np.frombuffer(byte_view(chunk), "<f4").reshape(count, width)
