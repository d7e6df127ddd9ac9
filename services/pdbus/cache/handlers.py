"""What a cache node answers to get, put, delete and scan."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

from pdbus.bus.bus import Bus
from pdbus.cache.disk_tier import DiskTier
from pdbus.cache.pieces import Value
from pdbus.cache.transfers import Item, Transfers
from pdbus.caching.compression import pack, unpack
from pdbus.caching.disk_entry import DiskEntry
from pdbus.caching.entry import Entry
from pdbus.caching.fences import Fence
from pdbus.caching.store import Store
from pdbus.canonical import DIGEST_BYTES
from pdbus.context import RequestContext
from pdbus.errors import Conflict, InvalidRequest
from pdbus.messages.cache import (
    INLINE_BYTES,
    CacheDelete,
    CacheDeleteReply,
    CacheFound,
    CacheGet,
    CacheGetReply,
    CachePut,
    CachePutReply,
    CacheScan,
    CacheScanReply,
    ScannedEntry,
)
from pdbus.recording import Told

MOST_KEYS = 1024
MOST_SCANNED = 1024
REPLY_BYTES = 640 << 10
"""Of values and their material in one reply; the server's limit for a message is 1 MiB."""
LONGEST_NAME = 256

_ABSENT = -1


@dataclass(frozen=True, slots=True)
class Handlers:
    """`check_caught_up` raises Unavailable while the node may have missed an invalidation. `disk`: the tier below the
    store, if the node has one."""

    node: str
    bus: Bus
    store: Store
    transfers: Transfers
    longest_ttl_s: float
    check_caught_up: Callable[[], None]
    disk: DiskTier | None = None

    async def get(self, wanted: CacheGet, ctx: RequestContext) -> CacheGetReply:
        """Small values inline, as far as the reply has room; the others by bulk, or only their sizes where the reader
        named no stream."""
        self.check_caught_up()
        _check_digests(wanted.root, *wanted.keys)
        if len(wanted.keys) > MOST_KEYS:
            raise InvalidRequest(f"at most {MOST_KEYS} keys in one get", param="keys")
        if wanted.stream and not wanted.receiver:
            raise InvalidRequest("a stream needs the bulk address of its receiver", param="receiver")
        if wanted.parts < 0:
            raise InvalidRequest("parts of 0 or more", param="parts")
        promoted = await self._promote_small(wanted)
        if promoted:
            self.check_caught_up()
        now_s, room = time.monotonic(), REPLY_BYTES
        told = self.store.fences.told
        absent = CacheFound(_ABSENT, generation=told.generation)
        found: list[CacheFound] = []
        large: list[Item] = []
        for key in wanted.keys:
            entry = self._find(wanted, key, now_s)
            if entry is None or len(entry.material) > room:
                if wanted.parts:
                    break
                found.append(absent)
                continue
            self._record("get", entry, root=wanted.root)
            room -= len(entry.material)
            value: bytes | None = None
            if isinstance(entry, Entry) and entry.size <= min(INLINE_BYTES, room):
                room -= entry.size
                value = _plain(entry)
            else:
                load_bytes = 0 if isinstance(entry, Entry) and not entry.packed else entry.size
                large.append(Item(len(found), entry.size, load_bytes, entry))
            age_ms = int((now_s - entry.stored_s) * 1e3)
            from_disk = isinstance(entry, DiskEntry) or key in promoted
            found.append(CacheFound(entry.size, age_ms, material=entry.material, value=value, disk=from_disk))
        found += [absent] * (len(wanted.keys) - len(found))
        if large and wanted.stream:
            receiver, stream = wanted.receiver, wanted.stream
            if not self.transfers.send(receiver, stream, large, self.load, wanted.parts, ctx.deadline):
                for item in large:
                    found[item.index] = absent
        return CacheGetReply(self.node, told.incarnation, tuple(found), told.generation)

    async def put(self, put: CachePut, ctx: RequestContext) -> CachePutReply:
        """Stores an inline value at once, and opens a stream for a larger one unless the same entry is there already.

        Fences are looked at again when the value is there: an invalidation may have come in between."""
        self.check_caught_up()
        _check_put(put)
        if not self.store.admit(put.root, put.name, _fence(put), len(put.material) + put.size):
            return CachePutReply(False)
        if put.value is not None:
            return CachePutReply(self._keep(put, put.value, pack(put.value)))
        held = self._find(CacheGet(put.kind, (put.key,), put.root), put.key, time.monotonic())
        if held is not None and held.material == put.material:
            return CachePutReply(False)
        stream = await self.transfers.take(put.size, partial(self._keep_large, put), ctx.deadline)
        return CachePutReply(False, self.bus.bulk.address if stream else "", stream)

    async def delete(self, wanted: CacheDelete, ctx: RequestContext) -> CacheDeleteReply:
        """Deletes what is here now, in every tier. Tombstones come by the log alone: no late call upsets its order."""
        deleted = self.store.delete(wanted.keys)
        if wanted.root:
            deleted += self.store.delete_root(wanted.root)
        if wanted.name:
            deleted += self.store.delete_name(wanted.name)
            if recorder := self.bus.recorder:
                recorder.put("delete_name", name=wanted.name, generation=self.store.fences.generation)
        return CacheDeleteReply(deleted)

    async def scan(self, wanted: CacheScan, ctx: RequestContext) -> CacheScanReply:
        if not 1 <= wanted.limit <= MOST_SCANNED:
            raise InvalidRequest(f"a limit of 1 to {MOST_SCANNED}", param="limit")
        entries, more = self.store.scan(wanted.after, wanted.limit, wanted.root)
        found = {e.key: ScannedEntry(e.kind, e.key, e.root, e.tenant, e.size, e.name) for e in entries}
        if self.disk:
            below, more_below = self.disk.disk.scan(wanted.after, wanted.limit, wanted.root)
            more = more or more_below
            found = {e.head.key: ScannedEntry("kv", e.head.key, e.root, e.head.tenant, e.size) for e in below} | found
        ordered = [found[key] for key in sorted(found)]
        return CacheScanReply(tuple(ordered[: wanted.limit]), more or len(ordered) > wanted.limit)

    def _find(self, wanted: CacheGet, key: bytes, now_s: float) -> Entry | DiskEntry | None:
        max_age_s = None if wanted.max_age_ms is None else wanted.max_age_ms / 1e3
        entry = self.store.get(wanted.kind, key, wanted.root, now_s, max_age_s)
        if entry is not None or not self.disk or wanted.kind != "kv" or self.store.fences.buried(wanted.root):
            return entry
        on_disk = self.disk.disk.get(key, wanted.root, now_s, max_age_s)
        if on_disk is not None:
            self.disk.expect(on_disk)
        return on_disk

    async def _promote_small(self, wanted: CacheGet) -> frozenset[bytes]:
        """Brings into memory what is on the disk and small enough to travel inside the reply; returns those keys."""
        if not self.disk or wanted.kind != "kv":
            return frozenset()
        known = [self.disk.disk.peek(key) for key in wanted.keys if key not in self.store]
        small = [entry for entry in known if entry and entry.size <= INLINE_BYTES]
        await self._from_disk(small)
        return frozenset(entry.key for entry in small)

    async def load(self, entries: Sequence[Entry | DiskEntry]) -> list[Value | None]:
        """Their values as readers get them; at once, since each turn in a thread costs as much as reading a page."""
        held = iter(await self._from_disk([entry for entry in entries if isinstance(entry, DiskEntry)]))
        there = [next(held) if isinstance(entry, DiskEntry) else entry for entry in entries]
        if not any(entry.packed for entry in there if entry):
            return [entry.value if entry else None for entry in there]
        return await asyncio.to_thread(lambda: [_plain(entry) if entry else None for entry in there])

    async def _from_disk(self, entries: Sequence[DiskEntry]) -> list[Entry | None]:
        """The entries with their values, which are in memory from now on as far as there is room."""
        if not entries or not self.disk:
            return []
        found: list[Entry | None] = []
        for entry, value in zip(entries, await self.disk.read(entries), strict=True):
            found.append(entry.with_value(value) if value is not None else None)
            if found[-1]:
                with contextlib.suppress(Conflict):  # its root was deleted meanwhile: this reader asked before that
                    self.store.put(found[-1])
        return found

    async def _keep_large(self, put: CachePut, value: bytes) -> None:
        self._keep(put, value, await asyncio.to_thread(pack, value))

    def _keep(self, put: CachePut, value: bytes, packed: bytes | None) -> bool:
        now_s = time.monotonic()
        entry = Entry(
            kind=put.kind,
            key=put.key,
            root=put.root,
            tenant=put.tenant,
            material=put.material,
            value=value if packed is None else packed,
            size=len(value),
            stored_s=now_s,
            expires_s=now_s + min(put.ttl_ms / 1e3, self.longest_ttl_s),
            packed=packed is not None,
            name=put.name,
        )
        kept = self.store.put(entry, _fence(put))
        if kept:
            self._record("put", entry, incarnation=put.incarnation, generation=put.generation)
        return kept

    def _record(self, event: str, entry: Entry | DiskEntry, **more: Told) -> None:
        """For the history, if it is wanted. `made`: of which root the entry is."""
        if recorder := self.bus.recorder:
            kind, name = (entry.kind, entry.name) if isinstance(entry, Entry) else ("kv", "")
            recorder.put(event, kind=kind, key=entry.key, made=entry.root, name=name or None, **more)


def _plain(entry: Entry) -> bytes:
    return unpack(entry.value, entry.size) if entry.packed else entry.value


def _fence(put: CachePut) -> Fence:
    return Fence(put.incarnation, put.generation)


def _check_put(put: CachePut) -> None:
    _check_digests(put.key, put.root)
    if put.ttl_ms <= 0:
        raise InvalidRequest("a time to live above 0", param="ttl_ms")
    if put.size < 0 or (put.value is not None and put.size != len(put.value)):
        raise InvalidRequest("the size is not that of the value", param="size")
    if len(put.name) > LONGEST_NAME:
        raise InvalidRequest(f"a name of at most {LONGEST_NAME} characters", param="name")


def _check_digests(*digests: bytes) -> None:
    if any(len(digest) != DIGEST_BYTES for digest in digests):
        raise InvalidRequest(f"keys and roots have {DIGEST_BYTES} bytes")
