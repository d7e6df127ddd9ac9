"""A fresh engine for any version of a running stack: what an answer that names the version has to be equal to.

It reads the version's blocks from the stack's param-servers and builds all of it anew, nothing shared with any other.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from typing import Any

from loadtest.invariance.engine import Running
from loadtest.stack import Refused, Stack
from loadtest.weights.load import Asked
from pdbus.bus.bus import Bus, connect
from pdbus.bus.presence import Fleet
from pdbus.context import Deadline
from pdbus.engine.version import Version, load
from pdbus.kv.format import PageFormat
from pdbus.messages.common import Digest
from pdbus.model.backend import Backend
from pdbus.model.backends import BackendOptions, open_backend
from pdbus.model.config import ModelConfig
from pdbus.peers.history import HistoryFollower
from pdbus.peers.weights import BlockReader
from pdbus.runtime.cores import usable_cores

PREFIX = "root-"
"""Of the root, in an answer's fingerprint."""
_LOG_S = 30.0
_CHUNK_TOKENS = 512
_NATIVE = re.compile(r"cpu/native-[^/]+/w-(fp32|int8|int4)[^/]*/kv-(\w+)")


@dataclass(frozen=True)
class _Computes:
    backend: Backend
    version: Version

    @property
    def page_format(self) -> PageFormat:
        return self.version.scope.page_format


@dataclass(frozen=True, slots=True)
class Checked:
    """How many answers were computed again, of how many versions, and which of them are not what they should be."""

    answers: int
    roots: int
    wrong: tuple[Asked, ...]


class Oracle:
    def __init__(self, reader: BlockReader, options: BackendOptions) -> None:
        self._reader, self._options = reader, options

    async def answers(self, root: Digest, prompts: Sequence[Sequence[int]], new_tokens: int) -> list[list[int]]:
        """Greedy ones, each alone. Raises what loading a version does."""
        opened: list[Backend] = []

        async def backend_for(config: ModelConfig) -> Backend:
            opened.append(open_backend(self._options, config))
            return opened[0]

        try:
            version = await load(root, self._reader, (), backend_for, lambda done, total: None)
            fresh = _Computes(opened[0], version)
            longest = max(map(len, prompts)) + new_tokens
            running = Running(fresh, fresh.page_format.pages_for(longest) + 1, _CHUNK_TOKENS, None)
            async with running.core:
                asked = (running.sequence(prompt, new_tokens) for prompt in prompts)
                return [(await running.answer(one, witnessed=False)).ids for one in asked]
        finally:
            for backend in opened:
                backend.close()

    async def check(self, asked: Sequence[Asked], roots: int, each: int) -> Checked:
        """Computes answers again: of so many versions, evenly chosen among those that answered, at most `each`."""
        by: defaultdict[str, list[Asked]] = defaultdict(list)
        for one in asked:
            if one.seen.ok and one.seen.ids:
                by[one.seen.fingerprint].append(one)
        wrong: list[Asked] = []
        count = 0
        chosen = evenly(list(by), roots)
        for fingerprint in chosen:
            own = evenly(by[fingerprint], each)
            root = bytes.fromhex(fingerprint.removeprefix(PREFIX))
            most = max(len(one.seen.ids) for one in own)
            right = await self.answers(root, [one.prompt for one in own], most)
            wrong += [one for one, ids in zip(own, right, strict=True) if one.seen.ids != ids[: len(one.seen.ids)]]
            count += len(own)
        return Checked(count, len(chosen), tuple(wrong))


def evenly(items: Sequence[Any], count: int) -> list[Any]:
    """So many of them, at equal distances, the first and the last among them."""
    if len(items) <= count:
        return list(items)
    return [items[round(at * (len(items) - 1) / max(count - 1, 1))] for at in range(count)]


@asynccontextmanager
async def oracle(stack: Stack) -> AsyncIterator[Oracle]:
    """Computes as the stack's workers do. Raises Refused where it can't."""
    async with AsyncExitStack() as life:
        bus = await life.enter_async_context(connect(stack.nats_url, name="loadtest oracle"))
        follower = await life.enter_async_context(HistoryFollower(bus, stack.model))
        await follower.caught_up(Deadline.after(_LOG_S))
        yield Oracle(BlockReader(bus, stack.model, follower), _options(await compute_class(bus, stack.model)))


async def compute_class(bus: Bus, model: str) -> str:
    """Of the model's workers."""
    found: list[str] = []

    def known(fleet: Fleet) -> bool:
        cards = (card for service in ("decode", "prefill") for card in fleet.live(service) if card.model == model)
        found[:] = [card.compute_class for card in cards if card.compute_class]
        return bool(found)

    async with Fleet(bus) as fleet:
        await fleet.wait_for(known, Deadline.after(_LOG_S))
    return found[0]


def _options(compute_class: str) -> BackendOptions:
    match = _NATIVE.fullmatch(compute_class)
    if not match:
        raise Refused(f"answers of {compute_class} can't be computed again here: only those of the native engine")
    precision: Any = match[1]
    kv_dtype: Any = match[2]
    return BackendOptions("native", precision, kv_dtype, threads=usable_cores())
