"""The feature cache: looked up for all items of a request at once; the source is asked for those that are missing."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from types import TracebackType
from typing import Generic, Self, TypeVar

from pdbus.bus.codec import decode, encode
from pdbus.caching.feature_key import FeatureKey
from pdbus.caching.fences import Fence
from pdbus.context import Deadline, RequestContext
from pdbus.errors import DeadlineExceeded, PdbusError, Unavailable
from pdbus.messages.common import Digest
from pdbus.peers.background import Background
from pdbus.peers.feature_entries import Looked
from pdbus.router.cache_control import CacheControl
from pdbus.router.feature_source import Entries, Feature, FeatureSource
from pdbus.router.flights import Flight, Flights, Place
from pdbus.telemetry.spans import meter

log = logging.getLogger(__name__)

Item = TypeVar("Item")

_ROUNDS = 3
"""So often may a source move on to another version while it is asked."""
_FILLS_AT_ONCE, _FILLS_WAITING, _FILL_BYTES = 4, 256, 64 << 20
_PUTS_AT_ONCE = 16


@dataclass(frozen=True, slots=True)
class Features:
    """Of one version all."""

    version: str
    values: tuple[bytes | None, ...]
    hits: int
    """Items that came from the cache."""


@dataclass(frozen=True, slots=True)
class _Missing(Generic[Item]):
    key: FeatureKey
    item: Item
    fence: Fence | None

    @property
    def place(self) -> Place:
        return self.key.key, self.fence if self.key.name else None


class FeatureCache:
    """Used from one event loop. Leaving it ends what it still writes and asks for."""

    def __init__(self, entries: Entries, ttl_s: float) -> None:
        self._entries = entries
        self._ttl_s = ttl_s
        self._flights: Flights[Feature] = Flights()
        self._background = Background(_FILLS_AT_ONCE, _FILLS_WAITING, _FILL_BYTES)
        self._lookups = meter().create_counter("pdbus.router.features", "{item}", "Features asked for, by outcome")

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._flights.__aexit__(kind, error, trace)
        await self._background.close()

    @property
    def flights(self) -> int:
        """Items are being asked for in so many."""
        return len(self._flights)

    @property
    def filling(self) -> int:
        """Writes that are not done yet."""
        return len(self._background)

    @property
    def idle(self) -> bool:
        """Nothing is asked for or written."""
        return not self.flights and not self.filling

    async def drain(self, deadline: Deadline) -> None:
        """Waits until what was put is written or given up, or the deadline passes."""
        await self._background.drain(deadline)

    async def get(
        self, source: FeatureSource[Item], items: Sequence[Item], ctx: RequestContext, cache: CacheControl
    ) -> Features:
        """Raises what the source does, DeadlineExceeded, and Unavailable where its versions don't come to rest."""
        keys = [source.key(item) for item in items]
        wanted = dict(zip(keys, items, strict=True))  # each once
        for _ in range(_ROUNDS):
            version = await source.version(ctx)
            found, missing = await self._look(source, version, wanted, ctx, cache)
            hits = sum(key in found for key in keys)
            had = await self._have(source, missing, ctx, cache)
            versions = {feature.version for feature in had.values()} | ({version} if hits else set())
            if len(versions) <= 1:
                self._count(source.kind, hits, len(keys) - hits)
                values = tuple(found[key] if key in found else had[key.key].value for key in keys)
                return Features(versions.pop() if versions else version, values, hits)
        raise Unavailable("the features changed while they were read", retry_after_s=1.0)

    async def _look(
        self,
        source: FeatureSource[Item],
        version: str,
        wanted: Mapping[FeatureKey, Item],
        ctx: RequestContext,
        cache: CacheControl,
    ) -> tuple[dict[FeatureKey, bytes], list[_Missing[Item]]]:
        """What is in the cache, and what is not. An entry of another version is deleted, and is not there."""
        keys = list(wanted)
        looked = [Looked()] * len(keys)
        if cache.read:
            looked = await self._entries.get(keys, source.root, ctx, max_age_s=cache.max_age_s)
        elif any(key.name for key in keys) and cache.store:  # for the fences only
            looked = [Looked(None, one.fence) for one in await self._entries.get(keys, source.root, ctx)]
        found: dict[FeatureKey, bytes] = {}
        stale: list[Digest] = []
        for key, one in zip(keys, looked, strict=True):
            feature = _read(one.value)
            if feature is None or feature.value is None:
                continue
            if feature.version == version and source.valid(feature.value):
                found[key] = feature.value
            else:
                stale.append(key.key)
        if stale:
            self._background.start(0, partial(self._entries.delete, stale, ctx))
        return found, [
            _Missing(key, wanted[key], one.fence) for key, one in zip(keys, looked, strict=True) if key not in found
        ]

    async def _have(
        self, source: FeatureSource[Item], missing: Sequence[_Missing[Item]], ctx: RequestContext, cache: CacheControl
    ) -> Mapping[bytes, Feature]:
        """By key. What another request is waiting for is not asked for again, unless this one wants it anew."""
        had: dict[bytes, Feature] = {}
        left = list(missing)
        joins = cache.read
        while left:
            flights: dict[Flight[Feature], None] = {}
            own: list[_Missing[Item]] = []
            for one in left:
                flight = self._flights.joinable(one.place) if joins and _joins(one) else None
                if flight:
                    flights[flight] = None
                else:
                    own.append(one)
            mine = self._begin(source, own, ctx, cache) if own else None
            await self._wait(ctx, [*flights, *([mine] if mine else [])])
            landed: dict[bytes, Feature] = {}
            for flight in flights:
                if not flight.task.cancelled() and flight.task.exception() is None:
                    landed |= flight.task.result()
            if mine:
                landed |= mine.task.result()
            had |= {one.key.key: landed[one.key.key] for one in left if one.key.key in landed}
            left = [one for one in left if one.key.key not in had]
            joins = False
        return had

    def _begin(
        self, source: FeatureSource[Item], own: Sequence[_Missing[Item]], ctx: RequestContext, cache: CacheControl
    ) -> Flight[Feature]:
        async def fetch() -> Mapping[bytes, Feature]:
            features = await source.fetch([one.item for one in own], ctx)
            if cache.store:
                pairs = [(one, f) for one, f in zip(own, features, strict=True) if f.value is not None]
                size = sum(len(feature.value or b"") for _, feature in pairs)
                self._background.start(size, partial(self._fill, source, pairs, ctx))
            return {one.key.key: feature for one, feature in zip(own, features, strict=True)}

        return self._flights.begin([one.place for one in own], fetch)

    async def _wait(self, ctx: RequestContext, flights: Sequence[Flight[Feature]]) -> None:
        try:
            async with ctx.deadline.timeout():
                await self._flights.wait(flights)
        except TimeoutError:
            raise DeadlineExceeded("the request's deadline passed before all features were there") from None

    async def _fill(
        self, source: FeatureSource[Item], pairs: Sequence[tuple[_Missing[Item], Feature]], ctx: RequestContext
    ) -> None:
        for start in range(0, len(pairs), _PUTS_AT_ONCE):
            await asyncio.gather(
                *(
                    self._entries.put(one.key, source.root, encode(feature), one.fence, ctx, ttl_s=self._ttl_s)
                    for one, feature in pairs[start : start + _PUTS_AT_ONCE]
                )
            )

    def _count(self, kind: str, hits: int, misses: int) -> None:
        for outcome, count in (("hit", hits), ("miss", misses)):
            if count:
                self._lookups.add(count, {"source": kind, "outcome": outcome})


def _joins(one: _Missing[Item]) -> bool:
    """Without a fence nobody would know that a named item was changed after the flight had begun."""
    return not one.key.name or one.fence is not None


def _read(entry: bytes | None) -> Feature | None:
    if entry is None:
        return None
    try:
        return decode(Feature, entry)
    except PdbusError as error:
        log.warning("a cached feature can't be read: %s", error.message)
        return None
