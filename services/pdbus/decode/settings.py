"""Settings of a decode worker."""

from __future__ import annotations

from dataclasses import dataclass

from pdbus.engine.settings import EngineSettings


@dataclass(frozen=True, kw_only=True)
class DecodeSettings(EngineSettings):
    most_running: int = 64
    """Answers in one step."""
