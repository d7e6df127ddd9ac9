"""A GGUF file as a Hugging Face checkpoint: names, config and the order of rows as transformers has them.

llama.cpp's converter (convert_hf_to_gguf.py) renames tensors, and for the architecture `llama`, which stands for
Mistral too, permutes the rows of q and k so that RoPE turns neighbours instead of halves. Both are undone here.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from pdbus.model.config import ARCHITECTURES, Family
from pdbus.model.gguf_file import GgufFile, GgufTensor, read_header
from pdbus.model.gguf_metadata import Metadata
from pdbus.model.refusal import CheckpointError, UnsupportedModel
from pdbus.model.rope_config import RopeScaling, llama3_divisors
from pdbus.model.source import Source, Tensor
from pdbus.model.vocabulary import read_vocabulary

_FIXED = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
_LAYER = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_BLOCK = re.compile(r"blk\.(\d{1,4})\.([a-z_]+)\.(weight|bias)")
_ROPE_FACTORS = "rope_freqs.weight"

_SERVED: dict[str, Family] = {"llama": "llama", "qwen2": "qwen2", "qwen3": "qwen3"}
"""`general.architecture` -> the family that it is read as; `llama` with a window is Mistral."""


def open_file(path: Path) -> Source:
    """Reads the header, turns metadata into config.json and the vocabulary into tokenizer.json.

    Raises CheckpointError for a broken file, UnsupportedModel for an architecture, number format or vocabulary that
    isn't served.
    """
    file = read_header(path)
    metadata = Metadata(file)
    named = metadata.text("general.architecture")
    architecture = _SERVED.get(named)
    if architecture is None:
        raise UnsupportedModel(f"{path}: architecture {named!r:.80} is not served from GGUF: {', '.join(_SERVED)} are")
    if metadata.integer("split.count", 1) > 1:
        raise UnsupportedModel(f"{path}: one part of a split GGUF file; merge the parts with llama-gguf-split first")
    tensors = {_hf_name(file, name): tensor for name, tensor in file.tensors.items() if name != _ROPE_FACTORS}
    config = _config(file, metadata, architecture, tensors)
    vocabulary = read_vocabulary(metadata)
    heads = {"self_attn.q_proj": config["num_attention_heads"], "self_attn.k_proj": config["num_key_value_heads"]}

    def read(name: str) -> Tensor:
        tensor = tensors[name].read()
        permuted = heads.get(name.rpartition(".")[0].partition("layers.")[2].partition(".")[2])
        return _unpermuted(tensor, permuted) if permuted and architecture == "llama" else tensor

    shapes = {name: tensor.shape for name, tensor in tensors.items()}
    return Source(path, config | vocabulary.ids, vocabulary.meta, vocabulary.largest_id, shapes, read)


def _hf_name(file: GgufFile, name: str) -> str:
    if name in _FIXED:
        return _FIXED[name]
    match = _BLOCK.fullmatch(name)
    if match is None or match[2] not in _LAYER:
        raise CheckpointError.of(file.path, f"tensor {name:.80} has no place in a model of the Llama family")
    return f"model.layers.{int(match[1])}.{_LAYER[match[2]]}.{match[3]}"


def _unpermuted(tensor: Tensor, heads: int) -> Tensor:
    """Rows of each head from (pair, half) order back to (half, pair): RoPE turns row i with row i + head_dim / 2."""
    rows = tensor.shape[0]
    pairs = tensor.reshape(heads, rows // heads // 2, 2, -1)  # [heads, head_dim / 2, 2, columns]
    return np.ascontiguousarray(pairs.swapaxes(1, 2)).reshape(tensor.shape)


def _config(
    file: GgufFile, metadata: Metadata, architecture: Family, tensors: Mapping[str, GgufTensor]
) -> dict[str, Any]:
    """config.json in Hugging Face form. Shapes are checked against it later, like any other checkpoint's."""
    if "model.embed_tokens.weight" not in tensors:
        raise CheckpointError.of(file.path, "tensor token_embd.weight is missing")
    if metadata.integer(f"{architecture}.expert_count", 0):
        raise UnsupportedModel(f"{file.path}: a mixture of experts is not served")
    window = metadata.integer(f"{architecture}.attention.sliding_window", 0)
    if window and architecture != "llama":
        raise UnsupportedModel(
            f"{file.path}: the file doesn't tell which layers of {architecture} have a sliding window"
        )
    family: Family = "mistral" if window else architecture
    heads = metadata.integer(f"{architecture}.attention.head_count")
    hidden = metadata.integer(f"{architecture}.embedding_length")
    head_dim = metadata.integer(f"{architecture}.attention.key_length", hidden // max(heads, 1))
    if metadata.integer(f"{architecture}.attention.value_length", head_dim) != head_dim:
        raise UnsupportedModel(f"{file.path}: heads of v are of another size than heads of k")
    if metadata.integer(f"{architecture}.rope.dimension_count", head_dim) != head_dim:
        raise UnsupportedModel(f"{file.path}: only heads that turn whole are served")
    theta = metadata.number(f"{architecture}.rope.freq_base", 10_000.0)
    config = {
        "architectures": [ARCHITECTURES[family]],
        "model_type": family,
        "vocab_size": tensors["model.embed_tokens.weight"].shape[0],
        "hidden_size": hidden,
        "intermediate_size": metadata.integer(f"{architecture}.feed_forward_length"),
        "num_hidden_layers": metadata.integer(f"{architecture}.block_count"),
        "num_attention_heads": heads,
        "num_key_value_heads": metadata.integer(f"{architecture}.attention.head_count_kv", heads),
        "head_dim": head_dim,
        "max_position_embeddings": metadata.integer(f"{architecture}.context_length"),
        "rms_norm_eps": metadata.number(f"{architecture}.attention.layer_norm_rms_epsilon"),
        "rope_theta": theta,
        "rope_scaling": _rope_scaling(file, metadata, architecture, theta, head_dim),
        "hidden_act": "silu",
        "tie_word_embeddings": "lm_head.weight" not in tensors,
        "torch_dtype": "float32",
    }
    if family == "mistral":
        config["sliding_window"] = window
    if family in ("llama", "qwen3"):
        config["attention_bias"] = "model.layers.0.self_attn.q_proj.bias" in tensors
    if family == "llama":
        config["mlp_bias"] = "model.layers.0.mlp.up_proj.bias" in tensors
    return config


def _rope_scaling(
    file: GgufFile, metadata: Metadata, architecture: str, theta: float, head_dim: int
) -> dict[str, Any] | None:
    """rope_scaling of config.json. Llama 3's is stored as its effect, a divisor per frequency: recognised by it."""
    kind = metadata.text(f"{architecture}.rope.scaling.type", "none")
    if _ROPE_FACTORS not in file.tensors:
        if kind == "none":
            return None
        return {"rope_type": kind, "factor": metadata.number(f"{architecture}.rope.scaling.factor")}
    stored = file.tensors[_ROPE_FACTORS]
    if kind != "none" or stored.shape != (head_dim // 2,):
        raise UnsupportedModel(f"{file.path}: {_ROPE_FACTORS} of shape {stored.shape} beside rope scaling {kind!r:.80}")
    divisors = stored.read()
    if not (np.all(np.isfinite(divisors)) and divisors.min() > 0.0 and 0.0 < theta < math.inf):
        raise CheckpointError.of(file.path, f"{_ROPE_FACTORS} and rope.freq_base must be numbers above 0")
    if np.all(divisors == 1.0):
        return None
    scaling = RopeScaling("llama3", float(divisors.max()))
    if not np.allclose(divisors, llama3_divisors(scaling, theta, head_dim), rtol=1e-5, atol=0.0):
        raise UnsupportedModel(f"{file.path}: {_ROPE_FACTORS} holds other frequencies than those of Llama 3")
    return {
        "rope_type": "llama3",
        "factor": scaling.factor,
        "low_freq_factor": scaling.low_freq_factor,
        "high_freq_factor": scaling.high_freq_factor,
        "original_max_position_embeddings": scaling.original_max_positions,
    }
