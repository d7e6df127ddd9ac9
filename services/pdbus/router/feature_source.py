"""What the feature cache rests on: a source of features, and the entries of cache nodes.

A source is an interface with two users: prefill workers of an encoder (encoders.py), and a caller's own service at a
subject of its own (feature_subject.py).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, TypeVar

from pdbus.caching.feature_key import FeatureKey
from pdbus.caching.fences import Fence
from pdbus.context import RequestContext
from pdbus.messages.common import Digest
from pdbus.peers.feature_entries import Looked

Item_contra = TypeVar("Item_contra", contravariant=True)


@dataclass(frozen=True, slots=True)
class Feature:
    """What a source says of one item, and an entry of the cache."""

    version: str
    """Of the source, where its entries are named; empty where their keys say it all."""
    value: bytes | None
    """None: there is no such item. Never stored."""


class FeatureSource(Protocol[Item_contra]):
    """Where features come from."""

    @property
    def kind(self) -> str:
        """For metrics."""

    @property
    def root(self) -> Digest:
        """What its entries belong to, and are deleted with."""

    def key(self, item: Item_contra) -> FeatureKey: ...

    def valid(self, value: bytes) -> bool:
        """Whether an entry's value may be one of it."""

    async def version(self, ctx: RequestContext) -> str:
        """What entries have to be of, to be used. Raises PdbusError where that is not known."""

    async def fetch(self, items: Sequence[Item_contra], ctx: RequestContext) -> Sequence[Feature]:
        """One for each item, in order. Raises PdbusError."""


class Entries(Protocol):
    """FeatureEntries, as far as they are needed here."""

    async def get(
        self, keys: Sequence[FeatureKey], root: Digest, ctx: RequestContext, *, max_age_s: float | None = None
    ) -> list[Looked]: ...

    async def put(
        self, key: FeatureKey, root: Digest, value: bytes, fence: Fence | None, ctx: RequestContext, *, ttl_s: float
    ) -> bool: ...

    async def delete(self, keys: Sequence[Digest], ctx: RequestContext) -> None: ...
