"""How hot each block is: how often it is read, how often a commit changes it. Counters that halve every ten minutes.

A block is counted by its name (tensor, slice), so that its heat outlives its content. Reads come by digest, many at a
time, and cost a dict's entry each; `name` sorts them later.
"""

from __future__ import annotations

import heapq
import time
from collections.abc import Callable, Iterable, Iterator, Mapping

from pdbus.messages.changelog import Commit
from pdbus.messages.common import Digest
from pdbus.messages.param_server import BlockHeat, TensorHeat
from pdbus.param_server.store import BlockStore
from pdbus.weights.layer import META, Layer
from pdbus.weights.manifest import Block, root_layers, tensor_blocks

HALF_LIFE_S = 600.0
MOST_COUNTED = 1 << 16
"""Names, the hottest ones; and reads that have no name yet."""
_LONGEST_S = 40.0 * HALF_LIFE_S

Name = tuple[str, int]


class Heat:
    """Used from one thread. `clock`: wall clock, seconds.

    A count is kept as the sum of 2^((t - start) / half life) over its events: time passes without touching it."""

    def __init__(self, clock: Callable[[], float] = time.time) -> None:
        self._clock = clock
        self._start_s = clock()
        self._unnamed: dict[Digest, float] = {}
        self._reads: dict[Name, float] = {}
        self._updates: dict[Name, float] = {}

    def read(self, digests: Iterable[Digest]) -> None:
        weight, unnamed = self._weight(self._clock()), self._unnamed
        for digest in digests:
            if digest in unnamed:
                unnamed[digest] += weight
            elif len(unnamed) < MOST_COUNTED:
                unnamed[digest] = weight

    def update(self, blocks: Iterable[Name], at_s: float) -> None:
        """A commit changed these blocks, then."""
        weight = self._weight(at_s)
        for name in blocks:
            self._updates[name] = self._updates.get(name, 0.0) + weight
        self._updates = _hottest(self._updates)

    def name(self, names: Mapping[Digest, Name]) -> None:
        """Gives the blocks that were read their names; those that have none any more are not counted."""
        unnamed, self._unnamed = self._unnamed, {}
        for digest, count in unnamed.items():
            if name := names.get(digest):
                self._reads[name] = self._reads.get(name, 0.0) + count
        self._reads = _hottest(self._reads)

    def blocks(self, most: int) -> tuple[BlockHeat, ...]:
        """The hottest blocks, the hottest first."""
        found = (BlockHeat(*name, reads, updates) for name, reads, updates in self._counts())
        return tuple(heapq.nlargest(most, found, key=lambda block: (block.reads + block.updates, block.tensor)))

    def tensors(self) -> tuple[TensorHeat, ...]:
        """By name."""
        found: dict[str, TensorHeat] = {}
        for (tensor, _), reads, updates in self._counts():
            one = found.get(tensor, TensorHeat(tensor, 0, 0.0, 0.0))
            found[tensor] = TensorHeat(tensor, one.blocks + 1, one.reads + reads, one.updates + updates)
        return tuple(found[tensor] for tensor in sorted(found))

    def _counts(self) -> Iterator[tuple[Name, float, float]]:
        now = self._weight(self._clock())
        for name in self._reads.keys() | self._updates.keys():
            yield name, self._reads.get(name, 0.0) / now, self._updates.get(name, 0.0) / now

    def _weight(self, at_s: float) -> float:
        if at_s - self._start_s > _LONGEST_S:
            self._begin_again(at_s)
        weight: float = 2.0 ** ((at_s - self._start_s) / HALF_LIFE_S)
        return weight

    def _begin_again(self, at_s: float) -> None:
        """Before the numbers grow too large."""
        less = 2.0 ** ((self._start_s - at_s) / HALF_LIFE_S)
        self._start_s = at_s
        for counts in (self._reads, self._updates):
            counts.update({name: count * less for name, count in counts.items()})
        self._unnamed = {digest: count * less for digest, count in self._unnamed.items()}


def changed_blocks(store: BlockStore, commit: Commit) -> list[Name]:
    """The blocks of weights that the commit changed, as far as the manifests are here; none for a first one."""
    parent = store.read(commit.parent) if commit.parent else None
    if parent is None:
        return []
    before = dict(root_layers(bytes(parent)))
    found: list[Name] = []
    for name, digest in commit.layers:
        old, new = (store.read(one) if one else None for one in (before.get(name), digest))
        if name != META and old is not None and new is not None:
            known = {block.digest for block in _blocks(old)}
            found += [(block.tensor, block.index) for block in _blocks(new) if block.digest not in known]
    return found


def _blocks(layer: memoryview) -> Iterator[Block]:
    for tensor in Layer.decode(bytes(layer)).tensors:
        yield from tensor_blocks(tensor)


def _hottest(counts: dict[Name, float]) -> dict[Name, float]:
    """As they are, or the hotter half where there are too many."""
    if len(counts) <= MOST_COUNTED:
        return counts
    return dict(heapq.nlargest(MOST_COUNTED // 2, counts.items(), key=lambda item: item[1]))
