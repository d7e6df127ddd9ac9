"""One cache node as its clients see it: batch reads and single writes, each value inline or by bulk."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace
from itertools import takewhile

from pdbus.bus.bus import Bus
from pdbus.caching.circuit import Circuit
from pdbus.caching.fences import Fence
from pdbus.context import RequestContext
from pdbus.errors import Corrupt, DeadlineExceeded, PdbusError, Unavailable
from pdbus.messages.bulk import CacheHead
from pdbus.messages.cache import INLINE_BYTES, CacheDelete, CacheFound, CacheGet, CacheGetReply, CachePut
from pdbus.messages.common import Digest
from pdbus.peers.cache_prefix import PrefixRead
from pdbus.subjects import CACHE_DELETE, CACHE_GET, CACHE_PUT, transfer_to

_STREAMED = frozenset({"kv", "model"})
"""Kinds whose values are large as a rule: their first read brings a bulk stream along."""


class CacheNode:
    """Speaks to the node `name` while it can be reached; the circuit remembers how that went."""

    def __init__(self, bus: Bus, name: str) -> None:
        self._bus = bus
        self.name = name
        self.circuit = Circuit()

    async def get(self, wanted: CacheGet, materials: Sequence[bytes], ctx: RequestContext) -> list[bytes | None]:
        """The values of `wanted.keys`, None where absent or made from other material. Raises PdbusError."""
        return (await self.look(wanted, materials, ctx))[0]

    async def look(
        self, wanted: CacheGet, materials: Sequence[bytes], ctx: RequestContext
    ) -> tuple[list[bytes | None], Fence]:
        """As `get`, with what a fill of a named one among them must bring back."""
        try:
            found, values, fence = await self._read(wanted, wanted.kind in _STREAMED, ctx)
            late = [at for at, item in enumerate(found) if _by_bulk(item) and values[at] is None]
            if late:  # larger than a message holds, and no stream was offered
                again = replace(wanted, keys=tuple(wanted.keys[at] for at in late))
                found_late, values_late, _ = await self._read(again, True, ctx)
                for at, item, value in zip(late, found_late, values_late, strict=True):
                    found[at], values[at] = item, value
        except PdbusError as error:
            self._note(error)
            raise
        self.circuit.succeeded()
        return [
            value if item.material == material else None
            for item, value, material in zip(found, values, materials, strict=True)
        ], fence

    async def delete(self, keys: Sequence[Digest], ctx: RequestContext) -> None:
        """Raises PdbusError."""
        await self._bus.call(CACHE_DELETE(node=self.name), CacheDelete(tuple(keys)), ctx)

    async def read(
        self, wanted: CacheGet, materials: Sequence[bytes], places: Sequence[int], into: PrefixRead, ctx: RequestContext
    ) -> None:
        """Reads values of a prefix as they come, up to the first that is absent or made from other material. `places`:
        where in `into` each of `wanted.keys` belongs. Raises PdbusError; what came until then stays."""
        bulk = self._bus.bulk
        try:
            async with bulk.receive() as incoming:
                wanted = replace(wanted, receiver=bulk.address, stream=incoming.stream, parts=into.parts)
                found = _checked(wanted, await self._bus.call(CACHE_GET(node=self.name), wanted, ctx))
                known = zip(found, materials, strict=True)
                usable = sum(1 for _ in takewhile(lambda one: one[0].size >= 0 and one[0].material == one[1], known))
                into.promise(places[:usable])
                for item, place in zip(found[:usable], places, strict=False):
                    into.on_disk[place] = item.disk
                    if item.value is not None:
                        into.take((place,), 0, into.parts, item.value)
                if any(map(_by_bulk, found)):
                    async for head, body in incoming.items(CacheHead, ctx.deadline):
                        if not 0 <= head.index < head.index + head.count <= len(found):
                            raise Corrupt(f"cache node {self.name} sent a value that was not asked for")
                        if head.index + head.count <= usable:
                            run = places[head.index : head.index + head.count]
                            into.take(run, head.part, head.parts or into.parts, body)
        except PdbusError as error:
            self._note(error)
            raise
        self.circuit.succeeded()

    async def put(self, put: CachePut, value: bytes | memoryview, ctx: RequestContext) -> bool:
        """Whether the node keeps the value now. Raises PdbusError: Conflict where the fill came too late."""
        try:
            stored = await self._write(put, value, ctx)
        except PdbusError as error:
            self._note(error)
            raise
        self.circuit.succeeded()
        return stored

    async def _read(
        self, wanted: CacheGet, stream: bool, ctx: RequestContext
    ) -> tuple[list[CacheFound], list[bytes | None], Fence]:
        if not stream:
            reply = await self._bus.call(CACHE_GET(node=self.name), wanted, ctx)
            found = _checked(wanted, reply)
            return found, [item.value for item in found], Fence(reply.incarnation, reply.generation)
        bulk = self._bus.bulk
        async with bulk.receive() as incoming:
            wanted = replace(wanted, receiver=bulk.address, stream=incoming.stream)
            reply = await self._bus.call(CACHE_GET(node=self.name), wanted, ctx)
            found = _checked(wanted, reply)
            values = [item.value for item in found]
            if any(map(_by_bulk, found)):
                async for head, body in incoming.items(CacheHead, ctx.deadline):
                    if not 0 <= head.index < len(found) or len(body) != found[head.index].size:
                        raise Corrupt(f"cache node {self.name} sent a value that was not announced")
                    values[head.index] = bytes(body)
        return found, values, Fence(reply.incarnation, reply.generation)

    async def _write(self, put: CachePut, value: bytes | memoryview, ctx: RequestContext) -> bool:
        if len(value) <= INLINE_BYTES:
            return (await self._bus.call(CACHE_PUT(node=self.name), replace(put, value=bytes(value)), ctx)).stored
        reply = await self._bus.call(CACHE_PUT(node=self.name), put, ctx)
        if not reply.stream:
            return reply.stored
        to = transfer_to(reply.address, reply.stream)
        async with self._bus.bulk.send(to, ctx.deadline) as out:
            await out.item(CacheHead(0), value)
        return True

    def _note(self, error: PdbusError) -> None:
        """A node that answers at all, if only to refuse, is no broken one."""
        if isinstance(error, Unavailable | DeadlineExceeded | Corrupt):
            self.circuit.failed(time.monotonic())
        else:
            self.circuit.succeeded()


def _by_bulk(item: CacheFound) -> bool:
    return item.size >= 0 and item.value is None


def _checked(wanted: CacheGet, reply: CacheGetReply) -> list[CacheFound]:
    if len(reply.found) != len(wanted.keys):
        raise Corrupt(f"cache node {reply.node} answered {len(reply.found)} of {len(wanted.keys)} keys")
    return list(reply.found)
