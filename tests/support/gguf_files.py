"""Tiny GGUF files, written from a Hugging Face folder the way that llama.cpp's converter does it."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
from gguf import GGMLQuantizationType, GGUFWriter
from gguf.quants import quantize
from safetensors.numpy import load_file

_NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


def tiny_gguf(
    folder: Path,
    file: Path,
    *,
    quantised: str = "F32",
    metadata: dict[str, Any] | None = None,
    tensors: dict[str, Any] | None = None,
) -> Path:
    """Converts `folder` (of `tiny_checkpoint`) to `file`.

    A value of `metadata` or `tensors` replaces or adds, and None drops. `quantised` is the number
    format of the matrices; vectors stay F32.
    """
    config = json.loads((folder / "config.json").read_text())
    architecture = "llama" if config["model_type"] == "mistral" else config["model_type"]
    writer = GGUFWriter(file, architecture)
    for key, value in (_metadata(folder, config, architecture) | (metadata or {})).items():
        _add(writer, key, value)
    for name, tensor in (_tensors(folder, config, architecture) | (tensors or {})).items():
        if tensor is None:
            continue
        kind = GGMLQuantizationType[quantised] if tensor.ndim == 2 else GGMLQuantizationType.F32
        writer.add_tensor(name, quantize(tensor, kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return file


def permuted(tensor: np.ndarray, heads: int) -> np.ndarray:
    """The order of rows that llama.cpp wants for q and k (LlamaModel.permute of its converter)."""
    split = tensor.reshape(heads, 2, tensor.shape[0] // heads // 2, *tensor.shape[1:])
    return np.ascontiguousarray(split.swapaxes(1, 2).reshape(tensor.shape))


def _metadata(folder: Path, config: dict[str, Any], architecture: str) -> dict[str, Any]:
    tokenizer = json.loads((folder / "tokenizer.json").read_text())
    texts = sorted(tokenizer["model"]["vocab"], key=tokenizer["model"]["vocab"].get)
    special = {token["content"] for token in tokenizer["added_tokens"]}
    shape = {
        "block_count": config["num_hidden_layers"],
        "context_length": config["max_position_embeddings"],
        "embedding_length": config["hidden_size"],
        "feed_forward_length": config["intermediate_size"],
        "attention.head_count": config["num_attention_heads"],
        "attention.head_count_kv": config["num_key_value_heads"],
        "attention.key_length": config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"],
        "attention.layer_norm_rms_epsilon": config["rms_norm_eps"],
        "rope.freq_base": config["rope_parameters"]["rope_theta"],
    }
    return {f"{architecture}.{name}": value for name, value in shape.items()} | {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "gpt-2",
        "tokenizer.ggml.tokens": texts,
        "tokenizer.ggml.token_type": [3 if text in special else 1 for text in texts],
        "tokenizer.ggml.merges": [" ".join(merge) for merge in tokenizer["model"]["merges"]],
        "tokenizer.ggml.bos_token_id": config["bos_token_id"],
        "tokenizer.ggml.eos_token_id": config["eos_token_id"],
        "tokenizer.chat_template": (folder / "chat_template.jinja").read_text(),
    }


def _tensors(folder: Path, config: dict[str, Any], architecture: str) -> dict[str, np.ndarray]:
    heads = {"self_attn.q_proj": config["num_attention_heads"], "self_attn.k_proj": config["num_key_value_heads"]}
    renamed = {}
    for name, tensor in load_file(folder / "model.safetensors").items():
        layer, module, kind = re.fullmatch(r"(?:model\.layers\.(\d+)\.)?(.+)\.(weight|bias)", name).groups()
        if architecture == "llama" and module in heads:
            tensor = permuted(tensor, heads[module])
        renamed[f"{f'blk.{layer}.' if layer else ''}{_NAMES[module]}.{kind}"] = tensor
    return renamed


def _add(writer: GGUFWriter, key: str, value: Any) -> None:
    match value:
        case None:
            pass
        case bool():
            writer.add_bool(key, value)
        case int():
            writer.add_uint32(key, value)
        case float():
            writer.add_float32(key, value)
        case str():
            writer.add_string(key, value)
        case _:
            writer.add_array(key, value)
