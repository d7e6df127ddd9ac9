"""Settings of the invalidator."""

from __future__ import annotations

from dataclasses import dataclass

from pdbus.context import LONGEST_DEADLINE_S
from pdbus.settings import Settings, SettingsError


@dataclass(frozen=True, kw_only=True)
class InvalidatorSettings(Settings):
    rollback_window_s: float = 600.0
    """How long what was made from a root stays after the root left its last ref: a rollback finds it warm."""
    longest_deadline_s: float = LONGEST_DEADLINE_S
    """When the second delete follows the first: no fill begun before the first can still be running then."""
    audit_per_s: float = 20.0
    """Cache entries that are looked at in a second, all nodes together; 0: none."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.audit_per_s < 0:
            raise SettingsError("PDBUS_AUDIT_PER_S can't be below 0")
        if self.rollback_window_s < 0 or self.longest_deadline_s < 0:
            raise SettingsError("PDBUS_ROLLBACK_WINDOW_S and PDBUS_LONGEST_DEADLINE_S can't be below 0")
