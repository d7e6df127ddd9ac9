"""Features in the cache nodes: read in one round, with the fences of named ones, written and deleted.

As with all caches, nothing here raises into a request's path. Each entry has one node: it can be had again elsewhere.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Iterator, Sequence
from dataclasses import dataclass
from typing import TypeVar

from pdbus.caching.feature_key import FeatureKey
from pdbus.caching.fences import Fence
from pdbus.context import Deadline, RequestContext
from pdbus.errors import Conflict, PdbusError
from pdbus.messages.cache import CacheGet, CachePut
from pdbus.messages.common import Digest
from pdbus.peers.cache import GET_S, PUT_S, CacheRing
from pdbus.peers.cache_node import CacheNode

log = logging.getLogger(__name__)

T = TypeVar("T")

_KEYS_AT_ONCE = 256
"""In one message to a node: about what a reply has room for."""


@dataclass(frozen=True, slots=True)
class Looked:
    """What the cache says of one key."""

    value: bytes | None = None
    fence: Fence | None = None
    """What a fill of a named entry must bring back; None where no node answered."""


class FeatureEntries:
    """The entries of kind "feature" of a ring."""

    def __init__(self, ring: CacheRing) -> None:
        self._ring = ring

    async def get(
        self, keys: Sequence[FeatureKey], root: Digest, ctx: RequestContext, *, max_age_s: float | None = None
    ) -> list[Looked]:
        """All of `keys` in one round, in their order. Takes 0.25 s at most. Never raises a PdbusError."""
        found = [Looked()] * len(keys)
        age_ms = None if max_age_s is None else int(max_age_s * 1e3)
        own = ctx.within(GET_S)

        async def ask(node: CacheNode, places: list[int]) -> None:
            wanted = CacheGet("feature", tuple(keys[at].key for at in places), root, max_age_ms=age_ms)
            answer = await _tried(node, node.look(wanted, [keys[at].material for at in places], own), own)
            if answer is not None:
                for at, value in zip(places, answer[0], strict=True):
                    found[at] = Looked(value, answer[1])

        await asyncio.gather(*(ask(node, places) for node, places in self._by_node([key.key for key in keys])))
        return found

    async def put(
        self, key: FeatureKey, root: Digest, value: bytes, fence: Fence | None, ctx: RequestContext, *, ttl_s: float
    ) -> bool:
        """Whether the node has it now. A named one needs the fence of its miss. Never raises a PdbusError."""
        node = self._ring.owner(key.key)
        if node is None or (key.name and fence is None):
            return False
        fence = fence or Fence("", 0)
        put = CachePut(
            "feature",
            key.key,
            root,
            ctx.tenant,
            key.material,
            int(ttl_s * 1e3),
            len(value),
            name=key.name,
            incarnation=fence.incarnation,
            generation=fence.generation,
        )
        own = RequestContext(Deadline.after(PUT_S), ctx.request_id, ctx.tenant)
        return bool(await _tried(node, node.put(put, value, own), own))

    async def delete(self, keys: Sequence[Digest], ctx: RequestContext) -> None:
        """From their nodes. Never raises a PdbusError."""
        own = RequestContext(Deadline.after(PUT_S), ctx.request_id, ctx.tenant)
        asked = ((node, [keys[at] for at in places]) for node, places in self._by_node(keys))
        await asyncio.gather(*(_tried(node, node.delete(group, own), own) for node, group in asked))

    def _by_node(self, keys: Sequence[Digest]) -> Iterator[tuple[CacheNode, list[int]]]:
        """Places in `keys`, by the node that holds them."""
        groups: dict[str, tuple[CacheNode, list[int]]] = {}
        for at, key in enumerate(keys):
            if node := self._ring.owner(key):
                groups.setdefault(node.name, (node, []))[1].append(at)
        for node, places in groups.values():
            for start in range(0, len(places), _KEYS_AT_ONCE):
                yield node, places[start : start + _KEYS_AT_ONCE]


async def _tried(node: CacheNode, asking: Awaitable[T], ctx: RequestContext) -> T | None:
    """None: no answer, or a refusal."""
    try:
        async with ctx.deadline.timeout():
            return await asking
    except TimeoutError:
        node.circuit.failed(time.monotonic())
    except Conflict:
        log.debug("cache node %s: a fill came too late", node.name)
    except PdbusError as error:
        log.debug("cache node %s: %s", node.name, error.message)
    return None
