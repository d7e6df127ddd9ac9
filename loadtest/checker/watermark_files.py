"""The watermark model's files: weights in which every part adds its mark, and all else (watermark.py)."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import TypeAlias

import numpy as np
import safetensors.numpy
import tokenizers
from tokenizers import decoders, models, pre_tokenizers

from loadtest.checker.watermark import FIRST, KV_WEIGHT, LANES, LAYERS, VALUES, VOCABULARY, Marks, mark, place, token

Array: TypeAlias = np.ndarray

HIDDEN = 64
_HEADS, _HEAD_DIM, _MIDDLE = 2, 32, 64
_HUGE = float(1 << 20)
_LANE = 1 << 21
"""By how much the right lane and layer win over all others: above the squares of all values."""
_GATE = 32.0
"""SiLU of it is itself, in fp32."""
_END = 257
_SPECIAL = ("<|im_start|>", "<|im_end|>", "<|endoftext|>")


def tensors(marks: Marks, only: Marks | None = None) -> dict[str, Array]:
    """The weights by their names; those alone that differ from `only`'s, where that is given."""
    found: dict[str, Array] = {}
    if only is None or only.embedding != marks.embedding:
        found["model.embed_tokens.weight"] = _embedding(marks.embedding)
    for layer in range(LAYERS):
        name = f"model.layers.{layer}"
        if only is None:
            found |= _fixed(name)
        if only is None or only.attention[layer] != marks.attention[layer]:
            found[f"{name}.self_attn.v_proj.weight"] = _matrix(
                _HEAD_DIM, HIDDEN, {(0, 0): mark(marks.attention[layer], layer)}
            )
        if only is None or only.mlp[layer] != marks.mlp[layer]:
            down = {(_told(layer), 0): mark(marks.mlp[layer], layer) / _GATE}
            found[f"{name}.mlp.down_proj.weight"] = _matrix(HIDDEN, _MIDDLE, down)
        if only is None:
            out = {(_told(layer), 0): float(KV_WEIGHT)}
            found[f"{name}.self_attn.o_proj.weight"] = _matrix(HIDDEN, _HEADS * _HEAD_DIM, out)
    if only is None:
        found["model.norm.weight"] = _norm()
    if only is None or only.head != marks.head:
        found["lm_head.weight"] = _head(marks.head)
    return found


def write(folder: Path, marks: Marks) -> Path:
    """A Hugging Face folder of 3 MB."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, content in files().items():
        (folder / name).write_bytes(content)
    safetensors.numpy.save_file(tensors(marks), folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def files() -> Mapping[str, bytes]:
    """All of the checkpoint but its weights. The text of an answer is its token ids, each behind a blank."""
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": VOCABULARY,
        "hidden_size": HIDDEN,
        "intermediate_size": _MIDDLE,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": _HEADS,
        "num_key_value_heads": 1,
        "head_dim": _HEAD_DIM,
        "max_position_embeddings": 512,
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
        "hidden_act": "silu",
        "tie_word_embeddings": False,
    }
    return {
        "config.json": json.dumps(config).encode(),
        "tokenizer.json": _tokenizer().to_str().encode(),
        "tokenizer_config.json": json.dumps({"eos_token": "<|im_end|>", "add_bos_token": False}).encode(),
        "generation_config.json": json.dumps({"eos_token_id": _END}).encode(),
    }


def _tokenizer() -> tokenizers.Tokenizer:
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    rest = [byte for byte in range(256) if byte not in printable]
    vocabulary = {chr(byte): byte for byte in printable} | {chr(256 + at): byte for at, byte in enumerate(rest)}
    vocabulary |= {f"\u0120{id}": id for id in range(256 + len(_SPECIAL), VOCABULARY)}  # a blank, byte-level
    vocabulary |= {special: 256 + at for at, special in enumerate(_SPECIAL)}
    tokenizer = tokenizers.Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(list(_SPECIAL))
    return tokenizer


def _told(layer: int) -> int:
    """The layer's channel; channel 0 is the huge one."""
    return 1 + layer


def _lane(lane: int, layer: int) -> int:
    """The channel that is 1 while the last token is of that lane and layer."""
    return 1 + LAYERS + lane * LAYERS + layer


def _norm() -> Array:
    """Undoes what RMSNorm divides by: channel 0 becomes 1, all others stay."""
    weight = np.full(HIDDEN, _HUGE / HIDDEN**0.5, np.float32)
    weight[0] = 1 / HIDDEN**0.5
    return weight


def _embedding(version: int) -> Array:
    weight = np.zeros((VOCABULARY, HIDDEN), np.float32)
    weight[:, 0] = _HUGE
    for layer in range(LAYERS):
        weight[:, _told(layer)] = mark(version, layer)
    for id in range(VOCABULARY):
        weight[id, _lane(*place(id))] = 1
    return weight


def _head(version: int) -> Array:
    """The logit of value t in a channel that holds r is 2 t (r + mark) - t²: highest where t is nearest to r + mark."""
    weight = np.zeros((VOCABULARY, HIDDEN), np.float32)
    values = np.arange(VALUES, dtype=np.float32)
    for lane in range(LANES):
        for layer in range(LAYERS):
            rows = slice(token(lane, layer, 0), token(lane, layer, 0) + VALUES)
            weight[rows, 0] = 2 * values * mark(version, layer) - values**2
            weight[rows, _told(layer)] = 2 * values
            weight[rows, _lane(lane, (layer - 1) % LAYERS)] = _LANE
    weight[:FIRST, 0] = -_LANE
    return weight


def _fixed(name: str) -> dict[str, Array]:
    """The tensors of a layer that are the same in all versions. Queries and keys of 0 weigh all positions alike."""
    return {
        f"{name}.input_layernorm.weight": _norm(),
        f"{name}.post_attention_layernorm.weight": _norm(),
        f"{name}.self_attn.q_proj.weight": _matrix(_HEADS * _HEAD_DIM, HIDDEN, {}),
        f"{name}.self_attn.k_proj.weight": _matrix(_HEAD_DIM, HIDDEN, {}),
        f"{name}.mlp.gate_proj.weight": _matrix(_MIDDLE, HIDDEN, {(0, 0): _GATE}),
        f"{name}.mlp.up_proj.weight": _matrix(_MIDDLE, HIDDEN, {(0, 0): 1.0}),
    }


def _matrix(rows: int, columns: int, elements: Mapping[tuple[int, int], float]) -> Array:
    weight = np.zeros((rows, columns), np.float32)
    for at, value in elements.items():
        weight[at] = value
    return weight
