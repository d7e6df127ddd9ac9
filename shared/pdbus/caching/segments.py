"""The files of one disk tier: a row of segments of equal size, of which the newest is appended to."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from pathlib import Path

from pdbus.caching.segment import Head, Segment

SEGMENTS = 16
"""Files that the budget is cut into. One is kept free for that which is being given up."""


class Segments:
    """Never takes more than `budget_bytes`. Empty until `open`."""

    def __init__(self, folder: Path, budget_bytes: int) -> None:
        self.folder = folder
        self.segment_bytes = budget_bytes // SEGMENTS
        self._row: list[Segment] = []
        """Oldest first."""
        self._appending = False
        """The last one is appended to: it is of this life, and sound."""
        self._retiring: list[Segment] = []
        """One at most."""
        self._number = 0

    @property
    def used_bytes(self) -> int:
        return sum(segment.limit for segment in (*self._row, *self._retiring))

    def __contains__(self, segment: Segment) -> bool:
        return segment in self._row or segment in self._retiring

    def open(self) -> Iterator[tuple[Segment, list[tuple[int, Head]]]]:
        """What a former life left, oldest first, each with its records; files that can't be used are deleted.

        Raises OSError where the folder can't be used."""
        self.folder.mkdir(parents=True, exist_ok=True)
        for path in sorted(self.folder.glob("*.kv")):
            usable = path.stem.isdecimal() and len(self._row) < SEGMENTS - 1
            opened = Segment.open(path) if usable else None
            if opened is None or opened[0].limit > self.segment_bytes:
                path.unlink()
                continue
            self._number = max(self._number, int(path.stem))
            self._row.append(opened[0])
            yield opened

    def reserve(self, size: int) -> tuple[Segment, int] | None:
        """A place for a record of `size` bytes, at most a segment. None: the oldest one has to be retired first."""
        offset = self._row[-1].reserve(size) if self._appending else None
        if offset is None:
            if len(self._row) >= SEGMENTS - 1:
                return None
            offset = self._append().reserve(size)
            assert offset is not None
        return self._row[-1], offset

    def stop_appending(self, segment: Segment) -> None:
        """It has a hole: what comes after that would be lost to the next life."""
        self._appending = self._appending and segment is not self._row[-1]

    def retire(self) -> Segment | None:
        """Takes the oldest one out of the row; its file stays until `remove_retired`."""
        if not self._row:
            return None
        self._appending = self._appending and len(self._row) > 1
        self._retiring = [self._row.pop(0)]
        return self._retiring[0]

    def remove_retired(self) -> list[Segment]:
        retired, self._retiring = self._retiring, []
        for segment in retired:
            segment.remove()
        return retired

    def remove_all_but(self, needed: Collection[Segment]) -> None:
        """Those that nobody needs give their room back at once, but for the one that is appended to."""
        last = self._row[-1:] if self._appending else []
        for segment in [one for one in self._row if one not in needed and one not in last]:
            self._row.remove(segment)
            segment.remove()

    def clear(self) -> None:
        segments, self._row, self._retiring, self._appending = [*self._row, *self._retiring], [], [], False
        for segment in segments:
            segment.remove()

    def _append(self) -> Segment:
        if self._appending:
            self._row[-1].seal()
        self._number += 1
        segment = Segment(self.folder / f"{self._number:08}.kv", self.segment_bytes)
        self._row.append(segment)
        self._appending = True
        return segment
