"""Packs a version's weights for the native CPU engine, beside an older one whose unchanged layers it shares."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, TypeAlias

import numpy as np

from pdbus.messages.common import Digest
from pdbus.model.backend import built
from pdbus.model.config import ModelConfig, expected_tensors
from pdbus.model.frequencies import frequencies
from pdbus.model.native_layer import linear_runs, packed_layer
from pdbus.model.native_llama import NativeLayer, NativeLlama, Precision
from pdbus.model.parts import EMBEDDING, HEAD, NORM, Part, Rows, parts_of, unchanged
from pdbus.model.rotate import rotated
from pdbus.native.build import NativeUnavailable
from pdbus.native.library import GROUP, LANES, NativeEngine
from pdbus.native.pack import PackedLinear
from pdbus.weights.layer import layer_of

Array: TypeAlias = "np.ndarray[Any, Any]"

_MOST_HEAD_DIM = 256
_MOST_GROUP = 64


def check_supported(config: ModelConfig) -> None:
    """Raises NativeUnavailable where the kernels' shapes don't fit the model."""
    widths = (config.hidden_size, config.intermediate_size, config.heads * config.head_dim)
    if any(width % GROUP for width in widths) or config.head_dim % LANES or config.head_dim > _MOST_HEAD_DIM:
        raise NativeUnavailable(f"widths {widths} and head_dim {config.head_dim} don't fit the kernels")
    group = config.heads // config.kv_heads
    if group > _MOST_GROUP:
        raise NativeUnavailable(f"{group} query heads to a KV head are too many for the kernels")


def build_native(
    config: ModelConfig,
    digests: Mapping[str, Digest],
    tensors: Mapping[str, Array],
    engine: NativeEngine,
    precision: Precision,
    reuse: NativeLlama | None = None,
) -> NativeLlama:
    """At once, from fp32 `tensors` by Hugging Face names. Raises as NativeBuilder does."""
    return built(NativeBuilder(config, digests, engine, precision, reuse), tensors)


class NativeBuilder:
    """A Builder (model/backend.py). The head of a rotated model is made with the gains of the last norm."""

    def __init__(
        self,
        config: ModelConfig,
        digests: Mapping[str, Digest],
        engine: NativeEngine,
        precision: Precision,
        reuse: NativeLlama | None = None,
        packed: Mapping[str, str] = MappingProxyType({}),
    ) -> None:
        """Shares the layers that `reuse` has under the same digest. Raises NativeUnavailable where the kernels don't
        fit the model. `packed`: as Backend.begin has it."""
        check_supported(config)
        self._config, self._digests, self._engine, self._precision = config, dict(digests), engine, precision
        self._rotates = precision == "int8-rows"
        origin = EMBEDDING if config.tied_embeddings else HEAD
        self._head_from = HEAD if precision == "int8-groups" and packed.get(HEAD) == "int8" else origin
        old = reuse if reuse and (reuse.precision, reuse.config) == (precision, config) else None
        same = unchanged(digests, old.digests if old else {})
        self._layers: dict[int, NativeLayer] = {}
        self._gains: Array | None = None
        self._old_embedding: Array | None = None
        self._old_head: PackedLinear | None = None
        if old:
            self._layers = {index: layer for index, layer in enumerate(old.layers) if f"layers.{index}" in same}
            self._gains = old.final_norm if "head" in same else None
            self._old_embedding = old.embedding if "embed" in same else None
            # Layers stand for what they were made from: of a tied head that is the embedding, however it comes.
            self._old_head = old.head if {layer_of(name) for name in (origin, *self._of_head)} <= same else None
        shape, dtype = (config.vocab_size, config.hidden_size), np.float32 if precision == "fp32" else np.float16
        self._embedding: Array = np.empty(shape, dtype) if self._old_embedding is None else self._old_embedding
        self._head = linear_runs(config.vocab_size, precision, head=True)
        of_head = () if self._old_head else self._of_head
        needed = {*(name for name in expected_tensors(config) if layer_of(name) not in same), *of_head}
        self.parts = parts_of(config, tuple(needed), packed)

    @property
    def _of_head(self) -> tuple[str, ...]:
        """The tensors that the head is made from."""
        return (self._head_from, NORM) if self._rotates else (self._head_from,)

    def add(self, part: Part, arrays: Mapping[str, Rows]) -> None:
        part.check(arrays)
        if part.start is not None:
            (name,) = part.shapes
            self._add_rows(name, part.start, arrays[name])
        elif part.layer == "head":
            self._gains = np.array(arrays[NORM], np.float32)
        else:
            index = int(part.layer.removeprefix("layers."))
            self._layers[index] = packed_layer(self._config, index, arrays, self._precision)

    def finish(self) -> NativeLlama:
        return NativeLlama(
            config=self._config,
            precision=self._precision,
            engine=self._engine,
            embedding=self._embedding,
            layers=tuple(self._layers[index] for index in range(self._config.layers)),
            final_norm=None if self._rotates else self._gains,
            head=self._old_head or self._head.packed(),
            digests=self._digests,
            _frequencies=frequencies(self._config),
        )

    def _add_rows(self, name: str, start: int, rows: Any) -> None:
        if name == EMBEDDING and self._old_embedding is None:
            turned = rotated(self._config, EMBEDDING, {name: rows}) if self._rotates else rows
            self._embedding[start : start + len(rows)] = turned
        if name == self._head_from and self._old_head is None:
            if self._rotates:
                assert self._gains is not None, "the last norm is the first part"
                rows = rotated(self._config, HEAD, {name: rows, NORM: self._gains})
            self._head.add(rows)
