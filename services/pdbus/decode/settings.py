"""Settings of a decode worker."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from pdbus.engine.settings import EngineSettings
from pdbus.settings import SettingsError


@dataclass(frozen=True, kw_only=True)
class DecodeSettings(EngineSettings):
    most_running: int = 64
    """Answers in one step."""
    colocated: bool = False
    """Every prompt is read by the worker that writes its answer, and no prefill worker is needed."""
    data: Path | None = None
    """Where the file of preempted answers lies; absent: where temporary files do."""
    swap_bytes: int = 1 << 30
    """Of that file; 0: an answer that finds no page to grow is started again elsewhere."""

    snapshot_tokens: int = 100
    """After so many tokens of an answer its KV goes to the cache nodes, and from then on page by page as it grows, so
    that another worker can go on from there should this one die; 0: never."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.swap_bytes < 0:
            raise SettingsError("PDBUS_SWAP_BYTES must be 0 or above")
        if self.snapshot_tokens < 0:
            raise SettingsError("PDBUS_SNAPSHOT_TOKENS must be 0 or above")
