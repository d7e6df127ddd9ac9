"""The ring of cache nodes, as the router, the workers and the invalidator use it.

A cache may only make things faster: nothing here raises into the request's path, and nothing waits for long. A node
that is dead, slow or fenced costs misses; its keys fall to their replicas, if they have any.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import defaultdict
from collections.abc import Awaitable, Sequence
from functools import partial
from types import TracebackType
from typing import Self, TypeVar

from pdbus.bus.bus import Bus
from pdbus.bus.presence import Fleet
from pdbus.caching.ring import HashRing
from pdbus.context import Deadline, RequestContext
from pdbus.errors import Conflict, PdbusError
from pdbus.messages.cache import CacheGet, CachePut, Kind
from pdbus.messages.common import Digest
from pdbus.peers.background import Background
from pdbus.peers.cache_counts import CacheCounts
from pdbus.peers.cache_node import CacheNode
from pdbus.peers.cache_prefix import PrefixRead

T = TypeVar("T")

log = logging.getLogger(__name__)

GET_S = 0.25
PUT_S = 5.0
_WRITES_AT_ONCE = 4
_WRITES_WAITING = 256
_WAITING_BYTES = 64 << 20


class CacheRing:
    """Reads and writes entries; its own writes end with it.

    `replicas`: nodes that hold an entry: 2 for answers, 1 for KV pages, which are large and can be computed again.
    `get_s`: what a read may take in all."""

    def __init__(self, bus: Bus, fleet: Fleet, *, replicas: int, get_s: float = GET_S) -> None:
        self._bus = bus
        self._fleet = fleet
        self._replicas = replicas
        self._get_s = get_s
        self._ring = HashRing(())
        self._nodes: dict[str, CacheNode] = {}
        self._background = Background(_WRITES_AT_ONCE, _WRITES_WAITING, _WAITING_BYTES)
        self._counts = CacheCounts()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._background.close()

    @property
    def writing(self) -> int:
        """Writes that are not done yet."""
        return len(self._background)

    async def get(
        self,
        kind: Kind,
        keys: Sequence[Digest],
        root: Digest,
        materials: Sequence[bytes],
        ctx: RequestContext,
        *,
        max_age_s: float | None = None,
        within_s: float | None = None,
    ) -> list[bytes | None]:
        """The values of `keys`, in their order; None where absent, or stored under other material than `materials`.

        Takes at most `within_s`, or `get_s`; less where the deadline is near. Never raises a PdbusError."""
        values: list[bytes | None] = [None] * len(keys)
        owners = [list(self._owners(key)) for key in keys]
        age_ms = None if max_age_s is None else int(max_age_s * 1e3)
        deadline = ctx.deadline.within(self._get_s if within_s is None else within_s)
        pending = list(range(len(keys)))
        for turns_left in range(self._replicas, 0, -1):
            # A node that hangs may only use up its turn's part of the time, so that the replica has its own.
            turn = RequestContext(deadline.within(deadline.remaining_s / turns_left), ctx.request_id, ctx.tenant)
            asked = self._by_node(pending, owners)
            answers = await asyncio.gather(
                *(
                    self._ask(
                        node,
                        turn,
                        node.get(
                            CacheGet(kind, tuple(keys[at] for at in places), root, max_age_ms=age_ms),
                            [materials[at] for at in places],
                            turn,
                        ),
                    )
                    for node, places in asked
                )
            )
            for (_, places), answer in zip(asked, answers, strict=True):
                for at, value in zip(places, answer or (), strict=False):
                    values[at] = value
            pending = [
                at for (_, places), answer in zip(asked, answers, strict=True) if answer is None for at in places
            ]
            if not pending or deadline.passed:
                break
        hits = sum(value is not None for value in values)
        self._counts.read(kind, {"memory": hits}, len(pending), len(keys))
        return values

    async def read_prefix(
        self,
        keys: Sequence[Digest],
        root: Digest,
        materials: Sequence[bytes],
        into: PrefixRead,
        ctx: RequestContext,
        *,
        within_s: float,
    ) -> int:
        """Reads the KV of a prefix, page by page in order, as it comes; `into` has a place for each of `keys`.

        Returns how many of them came whole, from the first on. Takes at most `within_s`. Never raises a PdbusError."""
        own = RequestContext(ctx.deadline.within(within_s), ctx.request_id, ctx.tenant)
        asked = self._by_node(list(range(len(keys))), [list(self._owners(key)) for key in keys])

        async def read(node: CacheNode, places: list[int]) -> None:
            wanted = CacheGet("kv", tuple(keys[at] for at in places), root)
            await node.read(wanted, [materials[at] for at in places], places, into, own)

        into.ask(len(asked))
        await asyncio.gather(*(self._ask(node, own, read(node, places)) for node, places in asked))
        whole = into.whole
        on_disk = sum(into.on_disk[:whole])
        self._counts.read("kv", {"memory": whole - on_disk, "disk": on_disk}, 0, len(keys))
        return whole

    def put(
        self,
        kind: Kind,
        key: Digest,
        root: Digest,
        material: bytes,
        value: bytes | memoryview,
        ctx: RequestContext,
        *,
        ttl_s: float,
    ) -> bool:
        """Begins to write an entry to its nodes, beside the request and past its end. False: it was dropped, since
        nobody is there to take it or too much is waiting already."""
        put = CachePut(kind, key, root, ctx.tenant, material, int(ttl_s * 1e3), len(value))
        begun = [
            self._background.start(len(value), partial(self._write, self._node(name), put, value, ctx))
            for name in self._owners(key)
        ]
        if not any(begun):
            self._counts.write(kind, "dropped")
        return any(begun)

    async def write(
        self,
        kind: Kind,
        key: Digest,
        root: Digest,
        material: bytes,
        value: bytes | memoryview,
        ctx: RequestContext,
        *,
        ttl_s: float,
    ) -> bool:
        """`put` for a caller who has the time: returns when it is done, True where a node has the entry now. Never
        raises a PdbusError."""
        put = CachePut(kind, key, root, ctx.tenant, material, int(ttl_s * 1e3), len(value))
        outcomes = [await self._write(self._node(name), put, value, ctx) for name in self._owners(key)]
        return any(outcome in ("stored", "kept out") for outcome in outcomes)

    async def drain(self, deadline: Deadline) -> None:
        """Waits until what was put is written or given up, or the deadline passes."""
        await self._background.drain(deadline)

    def owner(self, key: Digest) -> CacheNode | None:
        """The node that holds `key` first; None while there is none that would be asked."""
        for name in self._owners(key)[:1]:
            if self._node(name).circuit.admits(time.monotonic()):
                return self._node(name)
        return None

    def _owners(self, key: Digest) -> tuple[str, ...]:
        nodes = tuple(card.id for card in self._fleet.live("cache") if card.state == "ready")
        if nodes != self._ring.nodes:
            self._ring = HashRing(nodes)
            self._nodes = {name: node for name, node in self._nodes.items() if self._fleet.state(name) != "dead"}
        return self._ring.owners(key, self._replicas)

    def _node(self, name: str) -> CacheNode:
        return self._nodes.setdefault(name, CacheNode(self._bus, name))

    def _by_node(self, places: list[int], owners: list[list[str]]) -> list[tuple[CacheNode, list[int]]]:
        """Takes the next owner of each place, passing over those whose circuit is open."""
        admitted: dict[str, bool] = {}
        groups: defaultdict[str, list[int]] = defaultdict(list)
        for at in places:
            while owners[at]:
                name = owners[at].pop(0)
                if name not in admitted:
                    admitted[name] = self._node(name).circuit.admits(time.monotonic())
                if admitted[name]:
                    groups[name].append(at)
                    break
        return [(self._node(name), group) for name, group in groups.items()]

    async def _ask(self, node: CacheNode, ctx: RequestContext, asking: Awaitable[T]) -> T | None:
        """None: no answer, ask another."""
        try:
            async with ctx.deadline.timeout():
                return await asking
        except TimeoutError:
            node.circuit.failed(time.monotonic())
            log.debug("cache node %s did not answer in time", node.name)
        except PdbusError as error:
            log.debug("cache node %s: %s", node.name, error.message)
        except Exception:
            log.exception("reading from cache node %s failed", node.name)
        return None

    async def _write(self, node: CacheNode, put: CachePut, value: bytes | memoryview, ctx: RequestContext) -> str:
        outcome = "failed"
        try:
            if not node.circuit.admits(time.monotonic()):
                return outcome
            own = RequestContext(Deadline.after(PUT_S), ctx.request_id, ctx.tenant)
            async with own.deadline.timeout():
                outcome = "stored" if await node.put(put, value, own) else "kept out"
        except Conflict:
            outcome = "fenced"
        except TimeoutError:
            node.circuit.failed(time.monotonic())
        except PdbusError as error:
            log.debug("cache node %s: %s", node.name, error.message)
        finally:
            self._counts.write(put.kind, outcome)
        return outcome
