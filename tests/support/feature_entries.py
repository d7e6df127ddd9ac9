"""Cache nodes in memory, as FeatureEntries shows them: one node, that never forgets by itself."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from pdbus.caching.feature_key import FeatureKey
from pdbus.caching.fences import Fence, Fences
from pdbus.context import RequestContext
from pdbus.errors import Conflict
from pdbus.messages.common import Digest
from pdbus.peers.feature_entries import Looked


@dataclass
class DictEntries:
    stored: dict[bytes, tuple[bytes, bytes, bytes, str]] = field(default_factory=dict)
    """key -> root, material, value, name."""
    fences: Fences = field(default_factory=lambda: Fences("node", 1000, 1e9))
    gets: list[int] = field(default_factory=list)
    """Keys of each lookup."""
    max_ages: list[float | None] = field(default_factory=list)
    down: bool = False

    async def get(
        self, keys: Sequence[FeatureKey], root: Digest, ctx: RequestContext, *, max_age_s: float | None = None
    ) -> list[Looked]:
        self.gets.append(len(keys))
        self.max_ages.append(max_age_s)
        if self.down:
            return [Looked()] * len(keys)
        entries = [self.stored.get(key.key) for key in keys]
        return [
            Looked(entry[2] if entry and entry[:2] == (root, key.material) else None, self.fences.told)
            for entry, key in zip(entries, keys, strict=True)
        ]

    async def put(
        self, key: FeatureKey, root: Digest, value: bytes, fence: Fence | None, ctx: RequestContext, *, ttl_s: float
    ) -> bool:
        try:
            self.fences.check(root, key.name, fence)
        except Conflict:
            return False
        self.stored[key.key] = (root, key.material, value, key.name)
        return not self.down

    async def delete(self, keys: Sequence[Digest], ctx: RequestContext) -> None:
        for key in keys:
            self.stored.pop(key, None)

    def delete_name(self, name: str) -> None:
        """As the log of invalidations does."""
        self.fences.bump(name)
        for key in [key for key, entry in self.stored.items() if entry[3] == name]:
            del self.stored[key]
