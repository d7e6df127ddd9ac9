"""Packs a version's weights for the native CPU engine, beside an older one whose unchanged layers it shares."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeAlias

import numpy as np

from pdbus.errors import Corrupt
from pdbus.messages.common import Digest
from pdbus.model.config import ModelConfig, expected_tensors
from pdbus.model.native_llama import NativeLayer, NativeLlama, Precision
from pdbus.model.quantize import groups4, groups8, rows8
from pdbus.model.rope import frequencies
from pdbus.model.rotate import rotated, rotated_names
from pdbus.model.tensors import CheckedTensors
from pdbus.native.build import NativeUnavailable
from pdbus.native.library import GROUP, LANES, NativeEngine
from pdbus.native.pack import PackedLinear, interleaved, pack_f32, pack_g4, pack_g8, pack_i8
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
    """From fp32 `tensors` by Hugging Face names; layers that `reuse` has under the same digest are shared, and their
    tensors not asked for. Raises NativeUnavailable where the kernels don't fit the model."""
    check_supported(config)
    shared = _Shared(config, digests, precision, reuse)
    old = shared.model
    source = _Source(config, tensors, precision)
    return NativeLlama(
        config=config,
        precision=precision,
        engine=engine,
        embedding=old.embedding if old and shared.same("embed") else source.embedding(),
        layers=tuple(
            old.layers[index] if old and shared.same(f"layers.{index}") else _layer(config, source, index, precision)
            for index in range(config.layers)
        ),
        final_norm=old.final_norm if old and shared.same("head") else _copied(source.get("model.norm.weight")),
        head=old.head if old and shared.head else _packed(source["lm_head.weight"], None, precision, head=True),
        digests=dict(digests),
        _frequencies=np.ascontiguousarray(frequencies(config).numpy()),
    )


def needed_native(
    config: ModelConfig, digests: Mapping[str, Digest], precision: Precision, reuse: NativeLlama | None
) -> tuple[str, ...]:
    """The tensors that `build_native` will ask for."""
    shared = _Shared(config, digests, precision, reuse)
    head = ("model.embed_tokens.weight", "model.norm.weight")
    return tuple(
        name
        for name in expected_tensors(config)
        if not shared.same(layer_of(name)) or (name in head and not shared.head)
    )


class _Shared:
    """What a new version takes from an older one."""

    def __init__(
        self, config: ModelConfig, digests: Mapping[str, Digest], precision: Precision, reuse: NativeLlama | None
    ) -> None:
        fits = reuse is not None and (reuse.precision, reuse.config) == (precision, config)
        self.model = reuse if fits else None
        self._digests, self._tied = digests, config.tied_embeddings

    def same(self, layer: str) -> bool:
        digest = self._digests.get(layer)
        return self.model is not None and digest is not None and self.model.digests.get(layer) == digest

    @property
    def head(self) -> bool:
        """A tied head is made from the embedding; a rotated one from the last norm too."""
        return self.same("head") and (not self._tied or self.same("embed"))


class _Source:
    """The tensors as the kernels shall have them: rotated one by one where the precision asks for it."""

    def __init__(self, config: ModelConfig, tensors: Mapping[str, Array], precision: Precision) -> None:
        self._config, self._precision = config, precision
        self._tensors = CheckedTensors(config, tensors)
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
