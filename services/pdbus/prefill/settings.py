"""Settings of a prefill worker."""

from __future__ import annotations

from dataclasses import dataclass

from pdbus.engine.settings import EngineSettings


@dataclass(frozen=True, kw_only=True)
class PrefillSettings(EngineSettings):
    most_running: int = 8
    """Prompts in the engine at once. Each holds its pages until they are handed over."""
