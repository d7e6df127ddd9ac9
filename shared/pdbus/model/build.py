"""Builds a version of a model in torch, beside an older one whose unchanged layers it shares."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import TypeAlias

import numpy as np
import torch
from torch import Tensor

from pdbus.messages.common import Digest
from pdbus.model.backend import built
from pdbus.model.config import ModelConfig, expected_tensors
from pdbus.model.linear import Fp32Linear, Linear, fused
from pdbus.model.llama import Layer, Llama
from pdbus.model.parts import EMBEDDING, HEAD, NORM, Part, Patch, parts_of, unchanged
from pdbus.model.rope import Rope
from pdbus.weights.layer import layer_of

Arrays: TypeAlias = "Mapping[str, np.ndarray]"


def build(
    config: ModelConfig,
    digests: Mapping[str, Digest],
    tensors: Arrays,
    reuse: Llama | None = None,
    device: torch.device | str = "cpu",
) -> Llama:
    """At once, from fp32 `tensors` by Hugging Face names. Raises as Builder.add."""
    return built(TorchBuilder(config, digests, reuse, device), tensors)


class TorchBuilder:
    """A Builder (model/backend.py). A layer of which anything changed is made anew: nothing is quantised, so little
    could be saved."""

    patches: tuple[Patch, ...] = ()

    def __init__(
        self,
        config: ModelConfig,
        digests: Mapping[str, Digest],
        reuse: Llama | None,
        device: torch.device | str,
        packed: Mapping[str, str] = MappingProxyType({}),
    ) -> None:
        """Shares the layers that `reuse` has under the same digest. `packed`: as packed_dtypes (model/parts.py) has it;
        the arrays are fp32 all the same."""
        self._config, self._digests, self._device = config, dict(digests), torch.device(device)
        old = reuse if reuse and reuse.device == self._device else None
        same = unchanged(digests, old.digests if old else {})
        self._layers: dict[int, Layer] = {}
        self._norm: Tensor | None = None
        self._tables: dict[str, Tensor] = {}
        """Embedding and untied head, [vocab, hidden]."""
        self._old_head: Linear | None = None
        if old:
            self._layers = {index: layer for index, layer in enumerate(old.layers) if f"layers.{index}" in same}
            if "embed" in same and isinstance(old.embedding, Tensor):
                self._tables[EMBEDDING] = old.embedding
            if "head" in same:
                self._norm = old.final_norm
            if ("embed" if config.tied_embeddings else "head") in same and config == old.config:
                self._old_head = old.head
        needed = [name for name in expected_tensors(config) if layer_of(name) not in same]
        self.parts = parts_of(config, needed, packed)

    def patch(self, patch: Patch, arrays: Sequence[np.ndarray]) -> None:
        raise NotImplementedError("it asks for none")

    def add(self, part: Part, arrays: Arrays) -> None:
        part.check(arrays)
        source = _Source(arrays, self._device)
        if part.start is not None:
            (name,) = part.shapes
            table = self._tables.get(name)
            if table is None:
                table = self._tables[name] = torch.empty(expected_tensors(self._config)[name], device=self._device)
            table[part.rows] = source[name]
        elif part.layer == "head":
            self._norm = source[NORM]
        else:
            self._layers[int(part.layer.removeprefix("layers."))] = _layer(self._config, source, part.layer)

    def finish(self) -> Llama:
        config, embedding = self._config, self._tables[EMBEDDING]
        assert self._norm is not None, "every part was given"
        layers = tuple(self._layers[index] for index in range(config.layers))
        table = embedding if config.tied_embeddings else self._tables.get(HEAD, embedding)
        head = self._old_head or Fp32Linear(table)
        rope = Rope(config, self._device)
        return Llama(config, self._device, embedding, layers, self._norm, head, rope, self._digests)


@dataclass(frozen=True, slots=True)
class _Source:
    """The given arrays on the device."""

    arrays: Arrays
    device: torch.device

    def __getitem__(self, name: str) -> Tensor:
        """A copy of its own: a model never shares memory with a receive buffer or a mapped file."""
        return torch.tensor(self.arrays[name], device=self.device)

    def __contains__(self, name: str) -> bool:
        return name in self.arrays


def _layer(config: ModelConfig, source: _Source, layer: str) -> Layer:
    prefix = f"model.{layer}"

    def linear(*names: str) -> Linear:
        weights = [source[f"{prefix}.{name}.weight"] for name in names]
        biases = [source[f"{prefix}.{name}.bias"] for name in names if f"{prefix}.{name}.bias" in source]
        return fused(weights, biases)

    return Layer(
        input_norm=source[f"{prefix}.input_layernorm.weight"],
        qkv=linear("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
        qk_norm=_qk_norm(config, source, f"{prefix}.self_attn") if config.qk_norm else None,
        out=linear("self_attn.o_proj"),
        post_norm=source[f"{prefix}.post_attention_layernorm.weight"],
        gate_up=linear("mlp.gate_proj", "mlp.up_proj"),
        down=linear("mlp.down_proj"),
    )


def _qk_norm(config: ModelConfig, source: _Source, prefix: str) -> Tensor:
    q, k = source[f"{prefix}.q_norm.weight"], source[f"{prefix}.k_norm.weight"]  # [head_dim] each
    return torch.cat((q.expand(config.heads, -1), k.expand(config.kv_heads, -1)))
