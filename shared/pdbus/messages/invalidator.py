"""What invalidators receive: their own durable reminders."""

from __future__ import annotations

from dataclasses import dataclass

from pdbus.messages.common import Digest


@dataclass(frozen=True, slots=True)
class DueDelete:
    """Delete what was made from `root`, not before `due_ns` (wall clock), unless a ref names the root again by then."""

    model: str
    root: Digest
    due_ns: int
    second: bool
    cause: int
    """Change-log sequence of the ref entry by which the root left its last ref."""
