"""Why a checkpoint can't be served: the errors that loading one may end in."""

from __future__ import annotations

from pathlib import Path

from pdbus.errors import InvalidRequest


class CheckpointError(InvalidRequest):
    """A checkpoint, or a file of one, is not what it claims to be. The message names the file and the reason."""

    @classmethod
    def of(cls, path: Path, reason: str) -> CheckpointError:
        return cls(f"{path}: {reason}")


class UnsupportedModel(CheckpointError):
    """The checkpoint may be sound, but this engine would not compute what it means."""
