"""Which param-servers hold a virtual shard: rendezvous hashing over the membership in the change log.

A member that comes or goes moves only the shards that it wins or held (Thaler and Ravishankar, 1998).
"""

from __future__ import annotations

from collections.abc import Collection

from pdbus import canonical
from pdbus.weights.blocks import SHARDS

REPLICAS = 2


def ranked(shard: int, members: Collection[str]) -> tuple[str, ...]:
    """All members, the shard's owners first: the order in which a reader asks them."""
    return tuple(sorted(members, key=lambda member: canonical.digest([member, shard]), reverse=True))


def owners(shard: int, members: Collection[str]) -> tuple[str, ...]:
    """The min(2, members) owners of `shard`, the first one first."""
    return ranked(shard, members)[:REPLICAS]


def duties(server: str, members: Collection[str], present: Collection[str]) -> frozenset[int]:
    """The shards that `server` has to hold: those that it owns, and those whose owners are all gone (not `present`)
    and that would be its own if only the present members counted. The latter only adds copies; it never takes a shard
    from its owners, so that presence can't move data away."""
    alive = frozenset(members) & (frozenset(present) | {server})
    held = set()
    for shard in range(SHARDS):
        of_shard = owners(shard, members)
        if server in of_shard or (alive.isdisjoint(of_shard) and server in owners(shard, alive)):
            held.add(shard)
    return frozenset(held)
