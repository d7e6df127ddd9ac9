"""A model of the Llama family on the native CPU engine: its weights packed once, a whole step in one call."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, TypeAlias

import numpy as np

from pdbus.errors import Corrupt
from pdbus.messages.common import Digest
from pdbus.model.batch import Batch
from pdbus.model.config import ModelConfig, expected_tensors
from pdbus.model.native_pool import PAGE_TOKENS, KvDtype, NativePageFormat, NativePool
from pdbus.model.quantize import groups4, groups8, rows8
from pdbus.model.rope import frequencies
from pdbus.model.rotate import inner_block, rotated, rotated_names
from pdbus.native.build import NativeUnavailable
from pdbus.native.library import GROUP, LANES, BatchStruct, LayerStruct, ModelStruct, NativeEngine, address
from pdbus.native.pack import PackedLinear, interleaved, pack_f32, pack_g4, pack_g8, pack_i8

Array: TypeAlias = "np.ndarray[Any, Any]"
Precision: TypeAlias = Literal["fp32", "int8-rows", "int8-groups", "int4-groups"]
"""rows: rotated weights with a scale per output channel, activations with one per row. groups: plain weights with a
scale per 32 inputs, activations (int8) likewise; with int4 the head stays int8."""

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
    """One version of a model, ready to compute. Made by `build_native`."""

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
        object.__setattr__(self, "_struct", self._described())

    def page_format(self, dtype: KvDtype = "fp32") -> NativePageFormat:
        return NativePageFormat(self.config.layers, self.config.kv_heads, self.config.head_dim, dtype)

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
    ) -> Array:
        """Computes one step; returns fp32 logits [len(batch.logit_rows), vocab]. As Llama.forward; besides, `greedy`
        int32 [len(batch.logit_rows)] is filled with the best token of each row."""
        logits: Array = np.empty((len(batch.logit_rows), self.config.vocab_size), np.float32)
        arrays = _BatchArrays(batch)
        self.engine.forward(self._struct, pool.struct, arrays.struct, logits, greedy, on_layer)
        return logits

    def _described(self) -> ModelStruct:
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
            config.rms_norm_eps, self.embedding.dtype == np.float16, address(self.embedding),
            address(self._frequencies), address(self.final_norm), self.head.struct, layers,
        )  # fmt: skip


class _BatchArrays:
    """A Batch as the kernels read it; keeps the arrays alive that `struct` points into."""

    def __init__(self, batch: Batch) -> None:
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
        self._arrays = tuple(np.array(part, np.int32) for part in (batch.tokens, pieces, pages, batch.logit_rows))
        self.struct = BatchStruct(
            len(batch.tokens), len(pieces), len(batch.logit_rows), 0, *(address(array) for array in self._arrays)
        )


def build_native(
    config: ModelConfig,
    digests: Mapping[str, Digest],
    tensors: Mapping[str, Array],
    engine: NativeEngine,
    precision: Precision,
    reuse: NativeLlama | None = None,
) -> NativeLlama:
    """From fp32 `tensors` by Hugging Face names; layers that `reuse` has under the same digest are shared, and their
    tensors not asked for. Raises NativeUnavailable where the kernels don't fit the model."""
    check_supported(config)
    if reuse and (reuse.precision, reuse.config) != (precision, config):
        reuse = None
    source = _Source(config, tensors, precision)

    def same(layer: str) -> bool:
        return reuse is not None and layer in digests and reuse.digests.get(layer) == digests[layer]

    same_head = same("head") and (not config.tied_embeddings or same("embed"))
    return NativeLlama(
        config=config,
        precision=precision,
        engine=engine,
        embedding=reuse.embedding if reuse and same("embed") else source.embedding(),
        layers=tuple(
            reuse.layers[index] if reuse and same(f"layers.{index}") else _layer(config, source, index, precision)
            for index in range(config.layers)
        ),
        final_norm=reuse.final_norm if reuse and same_head else _copied(source.get("model.norm.weight")),
        head=reuse.head if reuse and same_head else _packed(source["lm_head.weight"], None, precision, head=True),
        digests=dict(digests),
        _frequencies=np.ascontiguousarray(frequencies(config).numpy()),
    )


class _Source:
    """The tensors as the kernels shall have them: rotated one by one where the precision asks for it."""

    def __init__(self, config: ModelConfig, tensors: Mapping[str, Array], precision: Precision) -> None:
        self._config, self._tensors, self._precision = config, tensors, precision
        self._turned = precision == "int8-rows"
        names = rotated_names(config) if self._turned else (*expected_tensors(config), "lm_head.weight")
        self._names = frozenset(names)

    def get(self, name: str) -> Array | None:
        if name not in self._names:
            return None
        if self._turned:
            return rotated(self._config, name, self._tensors)
        tied_head = name == "lm_head.weight" and self._config.tied_embeddings
        return self._tensors["model.embed_tokens.weight" if tied_head else name]

    def __getitem__(self, name: str) -> Array:
        tensor = self.get(name)
        if tensor is None:
            raise Corrupt(f"the tensor {name} is missing")
        return tensor

    def embedding(self) -> Array:
        exact = self["model.embed_tokens.weight"]
        return np.array(exact, np.float32 if self._precision == "fp32" else np.float16)


def _layer(config: ModelConfig, source: _Source, index: int, precision: Precision) -> NativeLayer:
    prefix = f"model.layers.{index}"

    def part(name: str, kind: str) -> Array | None:
        return source.get(f"{prefix}.{name}.{kind}")

    def joined(kind: str, *names: str) -> Array | None:
        found = [array for name in names if (array := part(name, kind)) is not None]
        return np.concatenate(found) if found else None

    def linear(*names: str) -> PackedLinear:
        weight = joined("weight", *names)
        if weight is None:
            raise Corrupt(f"{prefix} lacks {names}")
        return _packed(weight, joined("bias", *names), precision)

    gate_bias, up_bias = part("mlp.gate_proj", "bias"), part("mlp.up_proj", "bias")
    bias = None if gate_bias is None or up_bias is None else interleaved(gate_bias, up_bias)
    gate_up = interleaved(source[f"{prefix}.mlp.gate_proj.weight"], source[f"{prefix}.mlp.up_proj.weight"])
    qk_norm = None
    if config.qk_norm:
        q, k = (source[f"{prefix}.self_attn.{one}_norm.weight"] for one in "qk")
        qk_norm = np.concatenate((np.tile(q, (config.heads, 1)), np.tile(k, (config.kv_heads, 1))))
    return NativeLayer(
        input_norm=_copied(part("input_layernorm", "weight")),
        qkv=linear("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
        qk_norm=qk_norm,
        out=linear("self_attn.o_proj"),
        post_norm=_copied(part("post_attention_layernorm", "weight")),
        gate_up=_packed(gate_up, bias, precision),
        down=linear("mlp.down_proj"),
        window=config.window(index) or 0,
    )


def _packed(weight: Array, bias: Array | None, precision: Precision, *, head: bool = False) -> PackedLinear:
    match precision:
        case "fp32":
            return pack_f32(weight, bias)
        case "int8-rows":
            return pack_i8(*rows8(weight), bias)
        case "int8-groups":
            return pack_g8(*groups8(weight), bias)
        case "int4-groups":
            return pack_g8(*groups8(weight), bias) if head else pack_g4(*groups4(weight), bias)


def _copied(array: Array | None) -> Array | None:
    return None if array is None else np.array(array, np.float32)
