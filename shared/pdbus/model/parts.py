"""A version comes in parts: a layer at a time, and the large tensors in runs of rows, so that it never exists twice."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, TypeAlias

import numpy as np

from pdbus.errors import Corrupt
from pdbus.messages.common import Digest
from pdbus.model.config import ModelConfig, expected_tensors
from pdbus.weights.blocks import PACKED_ROW_BYTES, Run, rows_per_block
from pdbus.weights.layer import Tensor, layer_of
from pdbus.weights.packed import Int8Rows

Array: TypeAlias = "np.ndarray[Any, Any]"
Rows: TypeAlias = "Array | Int8Rows"

EMBEDDING, NORM, HEAD = "model.embed_tokens.weight", "model.norm.weight", "lm_head.weight"
PANEL_ROWS = 16
"""Runs of rows begin with a panel of the kernels, and with a block."""
_RUN_BYTES = 8 << 20

Changes: TypeAlias = Mapping[str, tuple[Run, ...]]
"""Layer -> rows that changed (weights/changes.py)."""
NO_CHANGES: Changes = MappingProxyType({})
Tensors: TypeAlias = Mapping[str, Tensor]
NO_TENSORS: Tensors = MappingProxyType({})


@dataclass(frozen=True, slots=True)
class Part:
    """Tensors that are fetched, and then packed, at once."""

    layer: str
    """As in weights/layer.py."""
    shapes: Mapping[str, tuple[int, ...]]
    """Of the arrays that it consists of, fp32 or Int8Rows, by Hugging Face names."""
    start: int | None = None
    """It is a run of rows, from this one on, of its one tensor. None: whole tensors."""

    @property
    def rows(self) -> slice | None:
        if self.start is None:
            return None
        (shape,) = self.shapes.values()
        return slice(self.start, self.start + shape[0])

    @property
    def nbytes(self) -> int:
        return sum(4 * math.prod(shape) for shape in self.shapes.values())

    def of(self, tensors: Mapping[str, Array]) -> dict[str, Array]:
        """This part of whole tensors; those that are missing are left out."""
        found = {name: array for name in self.shapes if (array := tensors.get(name)) is not None}
        return found if self.rows is None else {name: array[self.rows] for name, array in found.items()}

    def check(self, arrays: Mapping[str, Rows]) -> None:
        """Raises Corrupt where one is missing, or has another shape or dtype."""
        for name, shape in self.shapes.items():
            array = arrays.get(name)
            if array is None:
                raise Corrupt(f"the tensor {name} is missing")
            kind = "int8 rows" if isinstance(array, Int8Rows) else str(array.dtype)
            if array.shape != shape or kind not in ("float32", "int8 rows"):
                raise Corrupt(f"{name} is {kind} {array.shape}, not float32 {shape}")


@dataclass(frozen=True, slots=True)
class Patch:
    """Rows that changed, of any tensors: fetched at once, and put into what an older version has of their layers."""

    runs: tuple[Run, ...]
    nbytes: int


def patches_of(config: ModelConfig, runs: Iterable[Run]) -> tuple[Patch, ...]:
    """These runs, so many in each patch that it takes 8 MB in fp32, or a block if that is larger."""
    patches: list[Patch] = []
    held: list[Run] = []
    size = 0
    for run, nbytes in _cut(config, runs):
        if held and size + nbytes > _RUN_BYTES:
            patches.append(Patch(tuple(held), size))
            held, size = [], 0
        held.append(run)
        size += nbytes
    return (*patches, Patch(tuple(held), size)) if held else ()


def _cut(config: ModelConfig, runs: Iterable[Run]) -> Iterator[tuple[Run, int]]:
    shapes = expected_tensors(config)
    for run in runs:
        shape = shapes[run.tensor]
        row_bytes = 4 * math.prod(shape[1:])
        step = rows_per_block(shape, "fp32")
        step *= max(1, _RUN_BYTES // (step * row_bytes))
        for start in range(run.rows.start, run.rows.stop, step):
            stop = min(start + step, run.rows.stop)
            yield Run(run.tensor, slice(start, stop)), (stop - start) * row_bytes


def packed_dtypes(tensors: Tensors) -> Mapping[str, str]:
    """By name, the dtypes of the tensors that are stored in others than fp32."""
    return {name: tensor.dtype for name, tensor in tensors.items() if tensor.dtype in PACKED_ROW_BYTES}


def head_source(config: ModelConfig) -> str:
    """The tensor that the head is made from, in a version in fp32."""
    return EMBEDDING if config.tied_embeddings else HEAD


def parts_of(
    config: ModelConfig, names: Collection[str], packed: Mapping[str, str] = MappingProxyType({})
) -> tuple[Part, ...]:
    """These tensors of the model in parts: the last norm, then all others from the embedding up. The head that `names`
    may hold of a tied model was made from the embedding. `packed`: as packed_dtypes has it."""
    layers: dict[str, dict[str, tuple[int, ...]]] = {}
    for name, shape in (expected_tensors(config) | {HEAD: (config.vocab_size, config.hidden_size)}).items():
        if name in names:
            layers.setdefault(name if name in (EMBEDDING, HEAD) else layer_of(name), {})[name] = shape
    norm = layers.pop("head", None)
    parts = [Part("head", norm)] if norm else []
    for key, shapes in layers.items():
        parts += _runs(key, shapes[key], packed.get(key, "fp32")) if key in shapes else [Part(key, shapes)]
    return tuple(parts)


def unchanged(digests: Mapping[str, Digest], older: Mapping[str, Digest]) -> frozenset[str]:
    """The layers that have the same digest in both versions."""
    return frozenset(layer for layer, digest in digests.items() if older.get(layer) == digest)


def _runs(name: str, shape: tuple[int, ...], dtype: str = "fp32") -> Iterator[Part]:
    rows, *rest = shape
    step = math.lcm(rows_per_block(shape, dtype), PANEL_ROWS)
    step *= max(1, _RUN_BYTES // (4 * step * math.prod(rest)))
    for start in range(0, rows, step):
        yield Part(layer_of(name), {name: (min(step, rows - start), *rest)}, start)
