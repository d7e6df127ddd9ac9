"""`pdbus weights heat`: what of the model is read and changed most, as tables and as a picture."""

from __future__ import annotations

import asyncio
import heapq
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path

from rich.table import Column, Table

from pdbus.context import Deadline, RequestContext
from pdbus.errors import InvalidRequest, PdbusError, Unavailable
from pdbus.messages.param_server import BlockHeat, HeatReply, HeatWanted, TensorHeat
from pdbus.peers.history import HistoryFollower
from pdbus.stack.attach import Target, attached
from pdbus.stack.view import wide_console
from pdbus.subjects import WEIGHTS_HEAT

_ASK_S = 3.0
_LOG_S = 10.0


@dataclass(frozen=True)
class ModelHeat:
    """Of all servers together: each counts its own reads, and all see the same updates."""

    half_life_s: float
    tensors: tuple[TensorHeat, ...]
    blocks: tuple[BlockHeat, ...]
    """The hottest first."""


def heat(target: Target, top: int, png: Path | None) -> int:
    if png and find_spec("matplotlib") is None:
        raise InvalidRequest("a picture needs matplotlib: pip install 'pdbus[plots]'")
    found = asyncio.run(_ask(target, top))
    console = wide_console()
    console.print(f"reads and updates, halved every {found.half_life_s / 60:.0f} min")
    hottest = heapq.nlargest(top, found.tensors, key=lambda tensor: tensor.reads + tensor.updates)
    console.print(_table(("tensor", "blocks"), ((t.tensor, str(t.blocks), t.reads, t.updates) for t in hottest)))
    console.print(_table(("tensor", "slice"), ((b.tensor, str(b.index), b.reads, b.updates) for b in found.blocks)))
    if png:
        # Only here: who asks for no picture needs no matplotlib.
        draw: Callable[[ModelHeat, Path], None] = import_module("pdbus.stack.heat_picture").draw
        draw(found, png)
        console.print(str(png))
    return 0


def together(replies: Sequence[HeatReply], top: int) -> ModelHeat:
    """Sums the reads of all servers."""
    tensors: dict[str, TensorHeat] = {}
    blocks: dict[tuple[str, int], BlockHeat] = {}
    for reply in replies:
        for tensor in reply.tensors:
            one = tensors.get(tensor.tensor, TensorHeat(tensor.tensor, 0, 0.0, 0.0))
            tensors[tensor.tensor] = TensorHeat(
                one.tensor, max(one.blocks, tensor.blocks), one.reads + tensor.reads, max(one.updates, tensor.updates)
            )
        for block in reply.blocks:
            name = (block.tensor, block.index)
            known = blocks.get(name, BlockHeat(*name, 0.0, 0.0))
            blocks[name] = BlockHeat(*name, known.reads + block.reads, max(known.updates, block.updates))
    hottest = heapq.nlargest(top, blocks.values(), key=lambda block: (block.reads + block.updates, block.tensor))
    half_life_s = replies[0].half_life_s if replies else 0.0
    return ModelHeat(half_life_s, tuple(tensors[name] for name in sorted(tensors)), tuple(hottest))


async def _ask(target: Target, top: int) -> ModelHeat:
    async with attached(target) as bus, HistoryFollower(bus, target.model) as follower:
        await follower.caught_up(Deadline.after(_LOG_S))

        async def ask(server: str) -> HeatReply | None:
            to = WEIGHTS_HEAT(model=target.model, server=server)
            try:
                return await bus.call(to, HeatWanted(min(16 * top, 2048)), RequestContext.after(_ASK_S))
            except PdbusError:  # it is gone: the others tell what they have
                return None

        replies = [one for one in await asyncio.gather(*map(ask, follower.history.members)) if one]
    if not replies:
        raise Unavailable("no param-server answers")
    return together(replies, top)


def _table(names: Sequence[str], rows: Iterable[tuple[str, str, float, float]]) -> Table:
    numbers = (Column(title, justify="right") for title in (names[1], "reads", "updates"))
    table = Table(Column(names[0], no_wrap=True), *numbers, box=None)
    for name, number, reads, updates in rows:
        table.add_row(name, number, f"{reads:.1f}", f"{updates:.1f}")
    return table
