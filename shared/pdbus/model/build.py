"""Builds a version of a model from its tensors, beside an older one whose unchanged layers it shares."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
import torch
from torch import Tensor

from pdbus.messages.common import Digest
from pdbus.model.config import ModelConfig, expected_tensors
from pdbus.model.linear import Fp32Linear, Linear, fused
from pdbus.model.llama import Layer, Llama
from pdbus.model.rope import Rope
from pdbus.model.tensors import CheckedTensors
from pdbus.weights.layer import layer_of

Arrays: TypeAlias = "Mapping[str, np.ndarray]"


def needed_tensors(config: ModelConfig, digests: Mapping[str, Digest], reuse: Llama | None = None) -> tuple[str, ...]:
    """The tensors that `build` will ask for: those of layers that `reuse` doesn't hold under the same digest."""
    return tuple(name for name in expected_tensors(config) if not _reusable(layer_of(name), digests, reuse))


def build(
    config: ModelConfig,
    digests: Mapping[str, Digest],
    tensors: Arrays,
    reuse: Llama | None = None,
    device: torch.device | str = "cpu",
) -> Llama:
    """Copies the needed float32 `tensors` (Hugging Face names) into a model; `digests` names each layer's content.

    Arrays are asked for layer by layer, so a lazy mapping keeps little in memory at once. Raises Corrupt where one is
    missing, or has another shape or dtype than `config` asks for."""
    device = torch.device(device)
    reuse = reuse if reuse and reuse.device == device else None
    source = _Source(CheckedTensors(config, tensors), device)
    layers: list[Layer] = []
    for index in range(config.layers):
        name = f"layers.{index}"
        layers.append(
            reuse.layers[index] if reuse and _reusable(name, digests, reuse) else _layer(config, source, index)
        )
    same_embedding, same_head = (_reusable(name, digests, reuse) for name in ("embed", "head"))
    embedding = reuse.embedding if reuse and same_embedding else source["model.embed_tokens.weight"]
    norm = reuse.final_norm if reuse and same_head else source["model.norm.weight"]
    head: Linear
    if config.tied_embeddings:
        head = Fp32Linear(embedding)
    else:
        head = reuse.head if reuse and same_head else Fp32Linear(source["lm_head.weight"])
    return Llama(config, device, embedding, tuple(layers), norm, head, Rope(config, device), dict(digests))


def _reusable(layer: str, digests: Mapping[str, Digest], reuse: Llama | None) -> bool:
    return reuse is not None and layer in digests and reuse.digests.get(layer) == digests[layer]


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


def _layer(config: ModelConfig, source: _Source, index: int) -> Layer:
    prefix = f"model.layers.{index}"

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
