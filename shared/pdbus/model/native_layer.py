"""Packs one decoder layer for the native CPU engine, from the tensors of this layer alone."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeAlias

import numpy as np

from pdbus.errors import Corrupt
from pdbus.model.config import ModelConfig
from pdbus.model.native_llama import NativeLayer, Precision
from pdbus.model.quantize import groups4, groups8, rows8
from pdbus.model.rotate import rotated, rotated_names
from pdbus.native.pack import PackedLinear, interleaved, pack_f32, pack_g4, pack_g8, pack_i8
from pdbus.native.pack_runs import PackedRuns
from pdbus.weights.packed import Int8Rows

Array: TypeAlias = "np.ndarray[Any, Any]"
Rows: TypeAlias = "Array | Int8Rows"

_INTERLEAVED_ROWS = 256
"""Of gate and of up at a time; a multiple of 16."""


def packed_layer(config: ModelConfig, index: int, tensors: Mapping[str, Rows], precision: Precision) -> NativeLayer:
    """`tensors`: the layer's, fp32 or Int8Rows, by Hugging Face names. What is returned shares no memory with them."""
    source = _Source(config, index, tensors, precision)
    qk_norm = None
    if config.qk_norm:
        q, k = (source["self_attn.q_norm.weight"], source["self_attn.k_norm.weight"])  # [head_dim] each
        qk_norm = np.concatenate((np.tile(q, (config.heads, 1)), np.tile(k, (config.kv_heads, 1))))
    return NativeLayer(
        input_norm=_copied(source.get("input_layernorm.weight")),
        qkv=source.linear("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
        qk_norm=qk_norm,
        out=source.linear("self_attn.o_proj"),
        post_norm=_copied(source.get("post_attention_layernorm.weight")),
        gate_up=source.interleaved("mlp.gate_proj", "mlp.up_proj"),
        down=source.linear("mlp.down_proj"),
        window=config.window(index) or 0,
    )


def linear_runs(outputs: int, precision: Precision, *, head: bool = False) -> PackedRuns:
    """A linear layer to be packed as `precision` asks; `head`: the LM head."""
    return PackedRuns(outputs, lambda weight, bias: packed(weight, bias, precision, head=head))


def packed(weight: Rows, bias: Array | None, precision: Precision, *, head: bool = False) -> PackedLinear:
    """Rows of a linear layer: weight fp32 [rows, inputs], bias fp32 [rows]. Each row is quantised by itself; Int8Rows,
    for int8-groups alone, were."""
    if isinstance(weight, Int8Rows):
        return pack_g8(weight.weight, weight.scale, bias)
    match precision:
        case "fp32":
            return pack_f32(weight, bias)
        case "int8-rows":
            return pack_i8(*rows8(weight), bias)
        case "int8-groups":
            return pack_g8(*groups8(weight), bias)
        case "int4-groups":
            return pack_g8(*groups8(weight), bias) if head else pack_g4(*groups4(weight), bias)


class _Source:
    """The layer's tensors as the kernels shall have them: rotated one by one where the precision asks for it."""

    def __init__(self, config: ModelConfig, index: int, tensors: Mapping[str, Any], precision: Precision) -> None:
        self._config, self._tensors, self._precision = config, tensors, precision
        self._prefix = f"model.layers.{index}."
        self._turned = precision == "int8-rows"
        self._names = frozenset(rotated_names(config) if self._turned else tensors)

    def get(self, name: str) -> Any:
        full = self._prefix + name
        if full not in self._names:
            return None
        return rotated(self._config, full, self._tensors) if self._turned else self._tensors[full]

    def __getitem__(self, name: str) -> Any:
        tensor = self.get(name)
        if tensor is None:
            raise Corrupt(f"the tensor {self._prefix}{name} is missing")
        return tensor

    def linear(self, *names: str) -> PackedLinear:
        """Of these linears, their outputs one after the other."""
        weights = [self[f"{name}.weight"] for name in names]
        runs = linear_runs(sum(map(len, weights)), self._precision)
        for name, weight in zip(names, weights, strict=True):
            runs.add(weight, self.get(f"{name}.bias"))
        return runs.packed()

    def interleaved(self, gate: str, up: str) -> PackedLinear:
        weights = self[f"{gate}.weight"], self[f"{up}.weight"]
        gate_bias, up_bias = self.get(f"{gate}.bias"), self.get(f"{up}.bias")
        bias = None if gate_bias is None or up_bias is None else interleaved(gate_bias, up_bias)
        runs = linear_runs(sum(map(len, weights)), self._precision)
        for start in range(0, len(weights[0]), _INTERLEAVED_ROWS):
            rows = slice(start, start + _INTERLEAVED_ROWS)
            both = _interleaved(*(weight[rows] for weight in weights))
            runs.add(both, None if bias is None else bias[2 * start : 2 * start + len(both)])
        return runs.packed()


def _interleaved(gate: Rows, up: Rows) -> Rows:
    if isinstance(gate, Int8Rows) and isinstance(up, Int8Rows):
        return Int8Rows(interleaved(gate.weight, up.weight), interleaved(gate.scale, up.scale))
    assert not isinstance(gate, Int8Rows) and not isinstance(up, Int8Rows), "both come in one form"  # noqa: PT018
    return interleaved(gate, up)


def _copied(array: Array | None) -> Array | None:
    return None if array is None else np.array(array, np.float32)
