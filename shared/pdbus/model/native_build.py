"""Packs a version's weights for the native CPU engine, beside an older one whose unchanged layers it shares."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any, TypeAlias

import numpy as np

from pdbus.messages.common import Digest
from pdbus.model.backend import built
from pdbus.model.config import ModelConfig, expected_tensors
from pdbus.model.frequencies import frequencies
from pdbus.model.native_layer import linear_runs, packed_layer
from pdbus.model.native_llama import NativeLayer, NativeLlama, Precision
from pdbus.model.native_patch import PATCHABLE, LayerPatch, rows_packed
from pdbus.model.native_pieces import embedding_piece, layer_of_piece, layer_piece, linear_of_piece, linear_piece
from pdbus.model.parts import (
    EMBEDDING,
    HEAD,
    NO_CHANGES,
    NORM,
    Changes,
    Part,
    Patch,
    Rows,
    head_source,
    parts_of,
    patches_of,
    unchanged,
)
from pdbus.model.piece_keys import PieceKeys
from pdbus.model.rotate import rotated
from pdbus.native.abi import GROUP, LANES
from pdbus.native.build import NativeUnavailable
from pdbus.native.library import NativeEngine
from pdbus.native.pack import PackedLinear
from pdbus.native.pack_runs import PackedRuns
from pdbus.native.patch import PatchedLinear
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


def head_source_of(config: ModelConfig, precision: Precision, packed: Mapping[str, str]) -> str:
    """The tensor that the head is made from: that in int8, even of a tied model, where it can be taken as it is."""
    return HEAD if precision == "int8-groups" and packed.get(HEAD) == "int8" else head_source(config)


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
        changes: Changes = NO_CHANGES,
        keys: PieceKeys | None = None,
        packed: Mapping[str, str] = MappingProxyType({}),
    ) -> None:
        """Shares the layers that `reuse` has under the same digest, and what doesn't change of those in `changes`.
        `keys`: takes what it can from the shelf, and puts there what it makes of whole parts. `packed`: as
        packed_dtypes (model/parts.py) has it. Raises NativeUnavailable where the kernels don't fit the model."""
        check_supported(config)
        self._config, self._digests, self._engine, self._precision = config, dict(digests), engine, precision
        self._rotates = precision == "int8-rows"
        self._head_from = head_source_of(config, precision, packed)
        old = reuse if reuse and (reuse.precision, reuse.config) == (precision, config) else None
        same = unchanged(digests, old.digests if old else {})
        patched = frozenset(changes) - same if old and precision in PATCHABLE else frozenset()
        self._layers: dict[int, NativeLayer] = {}
        self._layer_patches: dict[int, LayerPatch] = {}
        self._gains: Array | None = None
        self._head: PackedLinear | PackedRuns | PatchedLinear = linear_runs(config.vocab_size, precision, head=True)
        if old:
            for index, layer in enumerate(old.layers):
                if f"layers.{index}" in same:
                    self._layers[index] = layer
                elif f"layers.{index}" in patched:
                    self._layer_patches[index] = LayerPatch(config, layer, precision)
            self._take_ends(old, same, patched)
        self._keeps_embedding = old is not None and "embed" in same
        shape, dtype = (config.vocab_size, config.hidden_size), np.float32 if precision == "fp32" else np.float16
        if old and "embed" in same | patched:
            self._embedding = old.embedding if "embed" in same else old.embedding.copy()
        else:
            self._embedding = np.empty(shape, dtype)
        of_head = self._of_head if isinstance(self._head, PackedRuns) else ()
        kept = same | patched
        needed = {*(name for name in expected_tensors(config) if layer_of(name) not in kept), *of_head}
        self._keys = None if self._rotates else keys
        self.parts = tuple(part for part in parts_of(config, needed, packed) if not self._has(part))
        self.patches = patches_of(config, (run for layer in sorted(patched) for run in changes[layer]))

    @property
    def _of_head(self) -> tuple[str, ...]:
        """The tensors that the head is made from."""
        return (self._head_from, NORM) if self._rotates else (self._head_from,)

    def _take_ends(self, old: NativeLlama, same: frozenset[str], patched: frozenset[str]) -> None:
        """Last norm and head of the older version, as far as they stay or are to be patched."""
        if "head" in same | patched:
            self._gains = old.final_norm
        # Layers stand for what they were made from: of a tied head that is the embedding, however it comes.
        of_head = {layer_of(name) for name in (head_source(self._config), *self._of_head)}
        if of_head <= same:
            self._head = old.head
        elif of_head <= same | patched:
            self._head = PatchedLinear(old.head)

    def patch(self, patch: Patch, arrays: Sequence[Array]) -> None:
        for run, rows in zip(patch.runs, arrays, strict=True):
            layer = layer_of(run.tensor)
            if layer.startswith("layers."):
                index = int(layer.removeprefix("layers."))
                name = run.tensor.removeprefix(f"model.{layer}.")
                self._layer_patches[index].put(name, run.rows.start, rows)
            elif run.tensor == NORM:
                self._gains = np.array(rows, np.float32)
            else:
                self._add_rows(run.tensor, run.rows.start, rows)

    def add(self, part: Part, arrays: Mapping[str, Rows]) -> None:
        part.check(arrays)
        if part.start is not None:
            (name,) = part.shapes
            self._add_rows(name, part.start, arrays[name])
            self._shelve_rows(part)
        elif part.layer == "head":
            self._gains = np.array(arrays[NORM], np.float32)
        else:
            index = int(part.layer.removeprefix("layers."))
            layer = self._layers[index] = packed_layer(self._config, index, arrays, self._precision)
            if self._keys:
                self._keys.shelf.put(self._keys.layer(index), part.layer, layer_piece(layer))

    def finish(self) -> NativeLlama:
        self._layers |= {index: patch.layer() for index, patch in self._layer_patches.items()}
        return NativeLlama(
            config=self._config,
            precision=self._precision,
            engine=self._engine,
            embedding=self._embedding,
            layers=tuple(self._layers[index] for index in range(self._config.layers)),
            final_norm=None if self._rotates else self._gains,
            head=self._head if isinstance(self._head, PackedLinear) else self._head.packed(),
            digests=self._digests,
            _frequencies=frequencies(self._config),
        )

    def _add_rows(self, name: str, start: int, rows: Any) -> None:
        if name == EMBEDDING and not self._keeps_embedding:
            turned = rotated(self._config, EMBEDDING, {name: rows}) if self._rotates else rows
            self._embedding[start : start + len(rows)] = turned
        if name != self._head_from or isinstance(self._head, PackedLinear):
            return
        if isinstance(self._head, PatchedLinear):
            self._head.put(start, rows, rows_packed(self._precision, head=True))
            return
        if self._rotates:
            assert self._gains is not None, "the last norm is the first part"
            rows = rotated(self._config, HEAD, {name: rows, NORM: self._gains})
        self._head.add(rows, at=start)

    # On the shelf

    def _has(self, part: Part) -> bool:
        """Whether the shelf had all that is made from the part."""
        if self._keys is None or (part.start is None and part.layer == "head"):
            return False
        if part.start is None:
            index = int(part.layer.removeprefix("layers."))
            piece = self._keys.shelf.read(self._keys.layer(index), part.layer)
            if piece:
                self._layers[index] = layer_of_piece(piece)
            return piece is not None
        pieces = {kind: self._keys.shelf.read(*self._rows_at(kind, part)) for kind in self._made_of(part)}
        if not all(pieces.values()):
            return False
        for kind, piece in pieces.items():
            assert piece
            if kind == "embedding":
                self._embedding[part.rows] = piece.arrays["rows"]
            else:
                assert isinstance(self._head, PackedRuns)
                self._head.put(linear_of_piece(piece), part.start)
        return True

    def _shelve_rows(self, part: Part) -> None:
        for kind in self._made_of(part) if self._keys else ():
            assert self._keys
            assert part.rows
            if kind == "embedding":
                piece = embedding_piece(self._embedding[part.rows], half=self._precision != "fp32")
            else:
                assert isinstance(self._head, PackedRuns)
                piece = linear_piece(self._head.given(part.rows.start, part.rows.stop - part.rows.start))
            key, name = self._rows_at(kind, part)
            self._keys.shelf.put(key, name, piece)

    def _rows_at(self, kind: str, part: Part) -> tuple[Digest, str]:
        assert self._keys
        return self._keys.rows(kind, part), f"{kind}/{part.start}"

    def _made_of(self, part: Part) -> list[str]:
        """The kinds of pieces that this builder needs the rows for."""
        assert self._keys
        wanted = {"embedding": not self._keeps_embedding, "head": isinstance(self._head, PackedRuns)}
        return [kind for kind in self._keys.made_of(part) if wanted[kind]]
