"""Every cache of something that is derived from weights, and how it is kept from outliving them.

What isn't here is neither deleted nor audited: a test fails for a kind of entry that is not registered.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, TypeAlias

from pdbus.messages.cache import Kind

Fence: TypeAlias = Literal["root", "name"]
"""root: an entry is void once its root is deleted. name: it says of which version it is, and its readers compare."""


@dataclass(frozen=True, slots=True)
class Cache:
    """`deleted_by`: what makes it forget, for people."""

    fence: Fence
    deleted_by: str


CACHES: Mapping[Kind, Cache] = {
    "result": Cache("root", "the log of invalidations, and a call to each node"),
    "feature": Cache("root", "the log of invalidations, by root or, of a caller's own service, by name"),
    "kv": Cache("root", "the log of invalidations, in memory and on disk; workers follow it for their own"),
    "model": Cache("root", "the change log: a worker drops a version that nothing wants, a param-server its blocks"),
}
"""By the kind of their entries on cache nodes; "model" is on workers, told by their cards."""


def fence_of(kind: Kind, name: str) -> Fence:
    """Of one entry: named ones fence themselves. Raises KeyError for a kind that nobody registered."""
    return "name" if name else CACHES[kind].fence
