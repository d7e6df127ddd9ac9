"""Up to which entry of which log of invalidations the disk of a node is in step.

A node that starts with entries of a former life replays the whole log. That is enough only if the log is the same one
and still has every entry since then: else the node can't know what it missed, and gives its disk up.
"""

from __future__ import annotations

import json
import os
from dataclasses import asdict, dataclass
from pathlib import Path

import msgspec

from pdbus.bus.jetstream import StreamState


@dataclass(frozen=True, slots=True)
class Place:
    """`created`: the log's date of birth; `seq`: of the last entry that was applied."""

    created: str
    seq: int

    def follows_from(self, state: StreamState) -> bool:
        """Whether the log as it is now has all that came after this place."""
        return self.created == state.created and state.first_seq <= self.seq + 1 and self.seq <= state.last_seq


class Logbook:
    """One file. Written by replacing it: after a crash it tells this place or an earlier one, which is as good."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def read(self) -> Place | None:
        """None where there is none that can be read."""
        try:
            return msgspec.json.decode(self._path.read_bytes(), type=Place)
        except (OSError, ValueError, RecursionError):  # msgspec's errors are ValueErrors
            return None

    def write(self, place: Place) -> None:
        """Raises OSError."""
        draft = self._path.with_suffix(".new")
        draft.write_text(json.dumps(asdict(place)))
        os.replace(draft, self._path)
