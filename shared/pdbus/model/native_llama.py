"""A model of the Llama family on the native CPU engine: a whole step in one call."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from ctypes import pointer
from dataclasses import dataclass, field
from typing import Any, Literal, TypeAlias

import numpy as np

from pdbus.kv.format import PAGE_TOKENS, KvDtype, PageFormat
from pdbus.messages.common import Digest
from pdbus.model.batch import Batch, check_streams
from pdbus.model.config import ModelConfig
from pdbus.model.native_pool import NativePool
from pdbus.model.rotate import inner_block
from pdbus.native.abi import BatchStruct, LayerStruct, ModelStruct, PartStruct, address
from pdbus.native.library import NativeEngine
from pdbus.native.pack import PackedLinear

Array: TypeAlias = "np.ndarray[Any, Any]"
Precision: TypeAlias = Literal["fp32", "int8-rows", "int8-groups", "int4-groups"]
"""rows: rotated weights with a scale per output channel, activations with one per row. groups: plain weights with a
scale per 32 inputs, activations (int8) likewise; with int4 the head stays int8."""


@dataclass(frozen=True, slots=True)
class NativeLayer:
    """The packed weights of one decoder layer; immutable, and shared by all versions that have them."""

    input_norm: Array | None
    qkv: PackedLinear
    qk_norm: Array | None
    out: PackedLinear
    post_norm: Array | None
    gate_up: PackedLinear
    down: PackedLinear
    window: int


@dataclass(frozen=True)
class NativeLlama:
    """One version of a model, ready to compute. Made by `build_native` (model/native_build.py)."""

    config: ModelConfig
    precision: Precision
    engine: NativeEngine
    embedding: Array
    layers: tuple[NativeLayer, ...]
    final_norm: Array | None
    head: PackedLinear
    digests: Mapping[str, Digest]
    """Layer name (`embed`, `layers.0`, …, `head`) -> digest, of what this was built from."""
    _frequencies: Array
    _struct: ModelStruct = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "_struct", self.described(self.embedding))

    def page_format(self, kv_dtype: KvDtype = "fp32") -> PageFormat:
        """The format of the pages that `forward` needs."""
        config = self.config
        return PageFormat(config.layers, config.kv_heads, config.head_dim, PAGE_TOKENS, kv_dtype, "kv3")

    @property
    def kind(self) -> Hashable:
        return self.config, self.precision, id(self.engine)

    @property
    def nbytes(self) -> int:
        """Bytes of weights."""
        linears = [linear for one in self.layers for linear in (one.qkv, one.out, one.gate_up, one.down)]
        return self.embedding.nbytes + self.head.nbytes + sum(linear.nbytes for linear in linears)

    def forward(
        self,
        batch: Batch,
        pool: NativePool,
        on_layer: Callable[[int], None] | None = None,
        greedy: Array | None = None,
        *,
        beside: Sequence[tuple[NativeLlama, Batch]] = (),
    ) -> Array:
        """Computes one step; returns fp32 logits [len(batch.logit_rows), vocab]. As Model.forward; besides, `greedy`
        int32 [len(batch.logit_rows)] is filled with the best token of each row."""
        parts = ((self, batch), *beside)
        whole = Batch.joined([one for _, one in parts])
        logits: Array = np.empty((len(whole.logit_rows), self.config.vocab_size), np.float32)
        check_streams(whole, pool)
        arrays = BatchArrays(whole, self.config.vocab_size, pool.pages)
        structs = [PartStruct(pointer(model._struct), len(one.tokens), len(one.logit_rows)) for model, one in parts]
        self.engine.forward(structs, pool.struct, arrays.struct, logits, greedy, on_layer)
        return logits

    def described(self, embedding: Array) -> ModelStruct:
        """For the kernels, with another table of embeddings, which the caller keeps alive, as this model."""
        config = self.config
        layers = (LayerStruct * config.layers)(
            *(
                LayerStruct(
                    address(one.input_norm), one.qkv.struct, address(one.qk_norm), one.out.struct,
                    address(one.post_norm), one.gate_up.struct, one.down.struct, one.window, 0,
                )
                for one in self.layers
            )
        )  # fmt: skip
        return ModelStruct(
            config.hidden_size, config.intermediate_size, config.heads, config.kv_heads, config.head_dim,
            config.layers, config.vocab_size, inner_block(config) if self.precision == "int8-rows" else 0,
            config.rms_norm_eps, embedding.dtype == np.float16, address(embedding),
            address(self._frequencies), address(self.final_norm), self.head.struct, layers,
        )  # fmt: skip


class BatchArrays:
    """A Batch as the kernels read it; keeps the arrays alive that `struct` points into.

    The kernels take ids for addresses: one outside of `vocab` or `pool_pages` is a ValueError here."""

    def __init__(self, batch: Batch, vocab: int, pool_pages: int) -> None:
        pieces: list[tuple[int, int, int, int]] = []
        pages: list[int] = []
        at = 0
        for piece in batch.sequences:
            needed = -(-(piece.past + piece.length) // PAGE_TOKENS)
            if len(piece.page_ids) < needed:
                raise ValueError(f"{piece.past + piece.length} tokens need {needed} pages, not {len(piece.page_ids)}")
            pieces.append((piece.start, piece.length, piece.past, at))
            pages.extend(piece.page_ids[:needed])
            at += needed
        if min(batch.tokens) < 0 or max(batch.tokens) >= vocab:
            raise ValueError(f"a token id is outside the vocabulary of {vocab}")
        if min(pages) < 0 or max(pages) >= pool_pages:
            raise ValueError(f"a page id is outside the pool of {pool_pages}")
        self._arrays = tuple(np.array(part, np.int32) for part in (batch.tokens, pieces, pages, batch.logit_rows))
        self.struct = BatchStruct(
            len(batch.tokens),
            len(pieces),
            len(batch.logit_rows),
            batch.first_layer,
            *(address(array) for array in self._arrays),
        )
