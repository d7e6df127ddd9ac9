"""Rotates a checkpoint so that int8 keeps its quality: no channel of activations stands out (QuaRot, arXiv 2404.00456).

The rotated model computes the same function. The residual stream turns by a fixed orthogonal matrix R, values turn per
head, and the MLP's inner values turn in blocks at run time; each turn is undone in the next weights. RMSNorm commutes
with a rotation once its gains are moved into the linears that follow. Everything is elementwise float64 in a fixed
order: the same bits come out on every machine, and a changed tensor changes only what is made from it.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import Any, TypeAlias

import numpy as np

from pdbus.model.config import ModelConfig, expected_tensors
from pdbus.model.hadamard import rotate

Array: TypeAlias = "np.ndarray[Any, Any]"

_ROWS_AT_ONCE = 2048
_MOST_INNER_BLOCK = 512


def inner_block(config: ModelConfig) -> int:
    """The block of the rotation before down_proj: the largest power of two up to 512 that divides the inner size."""
    return min(_MOST_INNER_BLOCK, config.intermediate_size & -config.intermediate_size)


def rotated_names(config: ModelConfig) -> tuple[str, ...]:
    """The tensors of the rotated model: an untied head at the end, and no norm gains of the residual stream (they
    would all be one); those of q and k stay."""
    gone = ("model.norm.weight", "lm_head.weight")
    kept = (name for name in expected_tensors(config) if name not in gone and not _is_stream_norm(name))
    return (*kept, "lm_head.weight")


def rotated(config: ModelConfig, name: str, tensors: Mapping[str, Array]) -> Array:
    """One tensor of the rotated model in fp32. `tensors`: the model's own, fp32, by Hugging Face names.

    To be run with the block rotation of `inner_block` before down_proj."""
    if name != "lm_head.weight":
        return _turned(config, name, tensors)
    head = tensors["model.embed_tokens.weight" if config.tied_embeddings else "lm_head.weight"]
    return _reads_stream(head, tensors["model.norm.weight"])


def _is_stream_norm(name: str) -> bool:
    return name.endswith(("input_layernorm.weight", "post_attention_layernorm.weight"))


def _turned(config: ModelConfig, name: str, tensors: Mapping[str, Array]) -> Array:
    tensor = tensors[name]
    if name == "model.embed_tokens.weight":
        return _reads_stream(tensor, None)
    layer, _, part = name.removeprefix("model.layers.").partition(".")
    match part.rsplit(".", 1)[0].rsplit(".", 1)[-1], part.endswith(".bias"):
        case ("q_proj" | "k_proj", False):
            return _reads_stream(tensor, tensors[f"model.layers.{layer}.input_layernorm.weight"])
        case ("v_proj", False):
            turned = _reads_stream(tensor, tensors[f"model.layers.{layer}.input_layernorm.weight"])
            return _by_head(turned.T, config.head_dim).T
        case ("v_proj", True):
            return _by_head(tensor, config.head_dim)
        case ("o_proj", False):
            return _writes_stream(_by_head(tensor, config.head_dim))
        case ("o_proj" | "down_proj", True):
            return _rotated(tensor, _signs(len(tensor)))
        case ("gate_proj" | "up_proj", False):
            return _reads_stream(tensor, tensors[f"model.layers.{layer}.post_attention_layernorm.weight"])
        case ("down_proj", False):
            return _writes_stream(_in_blocks(tensor, inner_block(config)))
        case _:  # biases of q, k, gate and up; norms of q and k
            return tensor


def _reads_stream(weight: Array, gains: Array | None) -> Array:
    """W diag(gains) R, for [outputs, hidden]."""
    signs = _signs(weight.shape[1])
    return _rotated(weight, signs if gains is None else signs * gains.astype(np.float64))


def _writes_stream(weight: Array) -> Array:
    """R^T W, for [hidden, inputs]."""
    return np.ascontiguousarray(_rotated(weight.T, _signs(len(weight))).T)


def _by_head(weight: Array, head_dim: int) -> Array:
    return _in_blocks(weight, head_dim)


def _in_blocks(weight: Array, block: int) -> Array:
    """Turns each run of `block` values of the last axis."""
    return _rotated(weight.reshape(-1, block), np.ones(block)).reshape(weight.shape)


def _rotated(rows: Array, factors: Array) -> Array:
    """(rows * factors) H along the last axis, in fp32."""
    flat = rows.reshape(-1, rows.shape[-1])
    parts = [rotate(flat[at : at + _ROWS_AT_ONCE] * factors) for at in range(0, len(flat), _ROWS_AT_ONCE)]
    return np.concatenate(parts).astype(np.float32).reshape(rows.shape)


def _signs(size: int) -> Array:
    """A fixed sequence of +1 and -1, so that no natural direction of a model lies along a Hadamard column."""
    bits = np.unpackbits(np.frombuffer(hashlib.shake_128(b"pdbus rotation 1").digest(-(-size // 8)), np.uint8))[:size]
    return 1.0 - 2.0 * bits
