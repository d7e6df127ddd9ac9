"""What a cached file is worth: how often it is read, and how often its name gets another content, together. Pure.

    worth = floor + reads / (1 + updates)

`reads` of a name over the contents that it has had: how often one content of it is read before the next one takes its
place. A block that every commit changes is worth little however often it is read, and one that stays is worth more with
each read. `floor` is the worth of what was evicted last, so that what was read often long ago does not stay for ever.

This is GreedyDual-Size with Frequency (Cherkasova, HPL-98-69R1: priority = floor + frequency * cost / size) with the
frequency counted per content; what a file costs to bring grows with its size, so that cost / size is the same for all.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TypeAlias

Name: TypeAlias = tuple[str, int]
"""(tensor, index) of a block; what else is cached makes names of the same form."""

_MOST_NAMES = 1 << 16


@dataclass(slots=True)
class _Use:
    digest: bytes
    reads: int = 0
    updates: int = 0


class Worths:
    """Counts of what is read here; of the most recent names only."""

    def __init__(self, most_names: int = _MOST_NAMES) -> None:
        self.floor = 0.0
        self._most_names = most_names
        self._uses: OrderedDict[Name, _Use] = OrderedDict()

    def read(self, name: Name, digest: bytes) -> float:
        """Counts a read of `name` with this content; what the content is worth now."""
        use = self._uses.get(name)
        if use is None:
            use = self._uses[name] = _Use(digest)
            if len(self._uses) > self._most_names:
                self._uses.popitem(last=False)
        elif use.digest != digest:
            use.digest = digest
            use.updates += 1
        self._uses.move_to_end(name)
        use.reads += 1
        return self.floor + use.reads / (1 + use.updates)


def victims(worths: Iterable[tuple[float, int, str]], to_free: int) -> list[tuple[float, int, str]]:
    """Which of the (worth, bytes, path) have to go, so that `to_free` bytes become free: those worth least."""
    chosen = []
    for one in sorted(worths):
        if to_free <= 0:
            break
        chosen.append(one)
        to_free -= one[1]
    return chosen
