"""The tensors that a version is built from, checked one by one as they are asked for."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, TypeAlias

import numpy as np

from pdbus.errors import Corrupt
from pdbus.model.config import ModelConfig, expected_tensors

Array: TypeAlias = "np.ndarray[Any, Any]"


class CheckedTensors(Mapping[str, Array]):
    """Float32 arrays by Hugging Face names, of those that `config` asks for: the others aren't in it.

    Raises Corrupt where one is missing, or has another shape or dtype than `config` asks for."""

    def __init__(self, config: ModelConfig, arrays: Mapping[str, Array]) -> None:
        self._shapes, self._arrays = expected_tensors(config), arrays

    def __getitem__(self, name: str) -> Array:
        array = self._arrays.get(name)
        if array is None:
            raise Corrupt(f"the tensor {name} is missing")
        if array.shape != self._shapes[name] or array.dtype != np.float32:
            raise Corrupt(f"{name} is {array.dtype} {array.shape}, not float32 {self._shapes[name]}")
        return array

    def __contains__(self, name: object) -> bool:
        return name in self._shapes

    def __iter__(self) -> Iterator[str]:
        return iter(self._shapes)

    def __len__(self) -> int:
        return len(self._shapes)
