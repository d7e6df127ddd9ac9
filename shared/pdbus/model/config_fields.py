"""Reading a config.json, field by field: typed, bounded, and refused with the field's name."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from pdbus.model.refusal import UnsupportedModel


@dataclass(frozen=True, slots=True)
class Fields:
    """Typed, bounded access to a config.json; a null counts as absent, as transformers takes it."""

    config: Mapping[str, Any]

    def integer(self, name: str, *, most: int, least: int = 1, default: int | None = None) -> int:
        value = self._value(name, default)
        if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= most:
            raise UnsupportedModel(f"{name} must be an integer from {least} to {most}, not {value!r:.80}")
        return value

    def number(self, name: str, *, most: float, default: float) -> float:
        value = self._value(name, default)
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0.0 < value <= most:
            raise UnsupportedModel(f"{name} must be a number above 0 and at most {most}, not {value!r:.80}")
        return float(value)

    def flag(self, name: str) -> bool:
        value = self._value(name, False)
        if not isinstance(value, bool):
            raise UnsupportedModel(f"{name} must be true or false, not {value!r:.80}")
        return value

    def _value(self, name: str, default: Any) -> Any:
        value = self.config.get(name)
        if value is None and default is None:
            raise UnsupportedModel(f"{name} is missing from config.json")
        return default if value is None else value
