"""Typed access to the metadata of a GGUF file: a value of another type than expected is a broken file."""

from __future__ import annotations

import numpy as np

from pdbus.model.gguf_file import GgufFile, Value
from pdbus.model.refusal import CheckpointError


class Metadata:
    """Each method takes a key and, where the key may be absent, what absence means; else it raises CheckpointError."""

    def __init__(self, file: GgufFile) -> None:
        self.path = file.path
        self._values = file.metadata

    def __contains__(self, key: str) -> bool:
        return key in self._values

    def text(self, key: str, default: str | None = None) -> str:
        value = self._value(key, default)
        if not isinstance(value, str):
            raise self._wrong(key, "a text")
        return value

    def integer(self, key: str, default: int | None = None) -> int:
        value = self._value(key, default)
        if isinstance(value, bool) or not isinstance(value, int):
            raise self._wrong(key, "an integer")
        return value

    def number(self, key: str, default: float | None = None) -> float:
        value = self._value(key, default)
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise self._wrong(key, "a number")
        return float(value)

    def flag(self, key: str, default: bool) -> bool:
        value = self._value(key, default)
        if not isinstance(value, bool):
            raise self._wrong(key, "true or false")
        return value

    def texts(self, key: str) -> list[str]:
        value = self._value(key, None)
        if not isinstance(value, list):
            raise self._wrong(key, "a list of texts")
        return value

    def numbers(self, key: str) -> list[float]:
        value = self._value(key, None)
        if not isinstance(value, np.ndarray) or not np.all(np.isfinite(value)):
            raise self._wrong(key, "a list of numbers")
        return [float(number) for number in value]

    def _value(self, key: str, default: Value | None) -> Value:
        value = self._values.get(key, default)
        if value is None:
            raise CheckpointError.of(self.path, f"metadata {key} is missing")
        return value

    def _wrong(self, key: str, wanted: str) -> CheckpointError:
        return CheckpointError.of(self.path, f"metadata {key} must be {wanted}")
