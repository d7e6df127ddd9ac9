"""Real param-servers in processes of their own, on a bus of their own, with a made-up model of some 100 MB."""

from __future__ import annotations

import asyncio
import sys
import tempfile
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from loadtest.tiny import tiny_checkpoint
from pdbus.bus.bus import Bus, connect
from pdbus.bus.presence import Fleet
from pdbus.context import Deadline
from pdbus.stack.nats_server import embedded_nats

MATRIX = "model.layers.0.mlp.up_proj.weight"
"""16 MB, 64 blocks."""
_SIZES = {"hidden_size": 512, "intermediate_size": 8192, "num_attention_heads": 8, "num_key_value_heads": 2}
_READY_S = 60.0
_END_S = 15.0


@dataclass(frozen=True)
class Rig:
    url: str
    bus: Bus
    fleet: Fleet
    folder: Path
    checkpoint: Path


@asynccontextmanager
async def param_servers(processes: Sequence[Sequence[str]], checkpoint: Path | None = None) -> AsyncIterator[Rig]:
    """Yields once all serve. `processes`: the models of each; every model has the same checkpoint."""
    async with AsyncExitStack() as life:
        folder = Path(life.enter_context(tempfile.TemporaryDirectory(prefix="pdbus-load-", ignore_cleanup_errors=True)))
        nats = await life.enter_async_context(embedded_nats(folder / "nats"))
        bus = await life.enter_async_context(connect(nats.url, name="loadtest"))
        await bus.logs.ensure()
        fleet = await life.enter_async_context(Fleet(bus))
        source = checkpoint or tiny_checkpoint(folder / "model", **_SIZES)
        for number, models in enumerate(processes):
            id = f"s{number}"
            arguments = ["serve", nats.url, str(folder), str(source), id, *models]
            await life.enter_async_context(_process(*arguments))
            ids = {f"{id}-{model}" for model in models}
            await fleet.wait_for(partial(_ready, ids), Deadline.after(_READY_S))
        yield Rig(nats.url, bus, fleet, folder, source)


async def reading(rig: Rig, model: str, readers: int, seconds: float, tensor: str = MATRIX) -> float:
    """Bytes a second that so many readers of one process get."""
    async with _process("read", rig.url, model, tensor, str(readers), str(seconds)) as child:
        assert child.stdout
        read_bytes, took_s = (await asyncio.wait_for(child.stdout.read(), seconds + _READY_S)).split()
    return float(read_bytes) / float(took_s)


def _ready(ids: set[str], fleet: Fleet) -> bool:
    return ids <= {card.id for card in fleet.live("param_server") if card.roots}


@asynccontextmanager
async def _process(*arguments: str) -> AsyncIterator[asyncio.subprocess.Process]:
    pipe = asyncio.subprocess.PIPE
    command = [sys.executable, "-m", "loadtest.param_servers.child", *arguments]
    child = await asyncio.create_subprocess_exec(*command, stdin=pipe, stdout=pipe)
    try:
        yield child
    finally:
        assert child.stdin
        child.stdin.close()
        try:
            await asyncio.wait_for(child.wait(), _END_S)
        except TimeoutError:
            child.kill()
            await child.wait()
