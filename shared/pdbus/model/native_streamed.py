"""A model on the native CPU engine whose weights are mapped files: read as it computes, let go where they don't fit."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Hashable, Mapping, Sequence
from ctypes import pointer
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

import numpy as np

from pdbus.kv.format import PAGE_TOKENS, KvDtype, PageFormat
from pdbus.messages.common import Digest
from pdbus.model.batch import Batch
from pdbus.model.config import ModelConfig
from pdbus.model.frequencies import frequencies
from pdbus.model.native_layer import packed, packed_layer
from pdbus.model.native_llama import BatchArrays, NativeLlama, Precision
from pdbus.model.native_patch import LayerPatch
from pdbus.model.native_pieces import (
    embedding_piece,
    layer_of_piece,
    layer_piece,
    linear_of_piece,
    linear_piece,
)
from pdbus.model.native_pool import NativePool
from pdbus.model.parts import Rows
from pdbus.model.residency import Residency, embedded
from pdbus.model.shelf import Piece
from pdbus.model.streamed_build import Pieces
from pdbus.native.abi import PartStruct
from pdbus.native.library import NativeEngine

Array: TypeAlias = "np.ndarray[Any, Any]"


@dataclass(frozen=True, slots=True)
class NativeForm:
    """A Form (model/streamed_build.py)."""

    config: ModelConfig
    engine: NativeEngine
    precision: Precision
    residency: Residency

    def layer(self, index: int, tensors: Mapping[str, Rows]) -> Piece:
        return layer_piece(packed_layer(self.config, index, tensors, self.precision))

    def patch(self, index: int, old: Piece) -> _Patch:
        return _Patch(LayerPatch(self.config, layer_of_piece(old), self.precision))

    def embedding(self, rows: Array) -> Piece:
        return embedding_piece(rows, half=self.precision != "fp32")

    def head(self, rows: Rows) -> Piece:
        return linear_piece(packed(rows, None, self.precision, head=True))

    def model(self, pieces: Pieces, digests: Mapping[str, Digest]) -> StreamedNative:
        return StreamedNative(self, pieces, digests)


@dataclass(frozen=True, slots=True)
class _Patch:
    layer: LayerPatch

    def put(self, name: str, start: int, values: Array) -> None:
        self.layer.put(name, start, values)

    def piece(self) -> Piece:
        return layer_piece(self.layer.layer())


class StreamedNative:
    """One version of a model, ready to compute: to the bit what NativeLlama computes.

    The rows of the embedding that a step needs are copied out of it; while a layer is computed, the one before it is
    let go, and the one after it is read from disk; the head is computed in runs of its rows."""

    def __init__(self, form: NativeForm, pieces: Pieces, digests: Mapping[str, Digest]) -> None:
        config = form.config
        self.config, self.digests, self.pieces = config, digests, pieces
        self._form, self._residency = form, form.residency
        self._head = tuple(linear_of_piece(piece) for piece in pieces.head)
        self._model = NativeLlama(
            config=config,
            precision=form.precision,
            engine=form.engine,
            embedding=np.empty((0, config.hidden_size), pieces.embedding[0].arrays["rows"].dtype),
            layers=tuple(map(layer_of_piece, pieces.layers)),
            final_norm=pieces.gains,
            head=replace(self._head[0], struct=_empty(self._head[0].struct)),
            digests=digests,
            _frequencies=frequencies(config),
        )

    def page_format(self, kv_dtype: KvDtype = "fp32") -> PageFormat:
        """The format of the pages that `forward` needs."""
        config = self.config
        return PageFormat(config.layers, config.kv_heads, config.head_dim, PAGE_TOKENS, kv_dtype, "kv3")

    @property
    def kind(self) -> Hashable:
        """Its own: no other version is computed in a step of it."""
        return id(self)

    @property
    def nbytes(self) -> int:
        """Bytes of weights, in memory or not."""
        pieces = (*self.pieces.layers, *self.pieces.embedding, *self.pieces.head)
        return sum(piece.nbytes for piece in pieces)

    def forward(
        self,
        batch: Batch,
        pool: NativePool,
        on_layer: Callable[[int], None] | None = None,
        greedy: Array | None = None,
        *,
        beside: Sequence[tuple[Any, Batch]] = (),
    ) -> Array:
        """As NativeLlama.forward; its weights pass by for it alone."""
        assert not beside, "no other is of its kind"
        logits: Array = np.empty((len(batch.logit_rows), self.config.vocab_size), np.float32)
        rows = self._embedded(batch)
        numbered = Batch(range(len(batch.tokens)), batch.sequences, batch.logit_rows)
        arrays = BatchArrays(numbered, len(rows), pool.pages)
        model = self._model.described(rows)
        part = PartStruct(pointer(model), len(numbered.tokens), len(numbered.logit_rows))
        with contextlib.closing(self._residency.walk(self.pieces.layers)) as walk:
            next(walk)

            def stored(index: int) -> None:
                """K and V of layer `index` are: the layers below it are done with."""
                if index:
                    next(walk)
                if on_layer:
                    on_layer(index)

            self._form.engine.forward([part], pool.struct, arrays.struct, logits[:, :0], None, stored)
        if len(logits):
            first = 0
            for index in self._residency.walk(self.pieces.head):
                head = self._head[index].struct
                self._form.engine.head(model, head, logits, first)
                first += head.outputs
        if greedy is not None:
            greedy[:] = logits.argmax(1)
        return logits

    def _embedded(self, batch: Batch) -> Array:
        """Of the batch's tokens, [tokens, hidden]. Raises ValueError for an id outside the vocabulary."""
        tokens = np.array(batch.tokens, np.int64)
        if tokens.min() < 0 or tokens.max() >= self.config.vocab_size:
            raise ValueError(f"a token id is outside the vocabulary of {self.config.vocab_size}")
        return embedded(self.pieces.embedding, tokens, self._residency)


def _empty(struct: Any) -> Any:
    """The same kind of linear layer without any output."""
    return type(struct)(struct.kind, 0, struct.inputs, 0, None, None, None)
