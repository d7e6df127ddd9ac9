"""Small sound GGUF files, as parts that can be changed one by one: architectures, vocabularies, number formats."""

from __future__ import annotations

import json
import struct
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
from gguf import GGMLQuantizationType
from gguf.quants import quantize

from loadtest.fuzz import seeds
from pdbus.model.rope_config import RopeScaling, llama3_divisors

_FIXED = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}
_PARTS = {
    "input_layernorm": "attn_norm", "self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v", "self_attn.o_proj": "attn_output", "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up", "mlp.down_proj": "ffn_down",
    "self_attn.q_norm": "attn_q_norm", "self_attn.k_norm": "attn_k_norm",
}  # fmt: skip
_SCALAR = {bool: (7, "<?"), int: (4, "<I"), float: (6, "<f")}
_BLOCK: Final = 32
FORMATS: Final = {"llama": "F32", "llama3": "F16", "mistral": "Q8_0", "qwen2": "Q4_0", "qwen3": "BF16"}
"""By the name in seeds.CONFIGS: of the matrices whose rows fill the format's blocks."""

Tensors = dict[str, list[Any]]
"""Of each [shape, format, offset, bytes]."""


@dataclass
class Gguf:
    metadata: dict[str, Any]
    tensors: Tensors

    @property
    def content(self) -> bytes:
        return gguf_bytes(self.metadata, self.tensors)


def gguf(name: str = "llama") -> Gguf:
    hf = seeds.model(name).config
    wide: dict[str, Any] = {"hidden_size": _BLOCK, "intermediate_size": _BLOCK}
    hf |= wide if FORMATS[name].startswith("Q") else {}
    architecture = "llama" if hf["model_type"] in ("llama", "mistral") else hf["model_type"]
    head_dim = hf.get("head_dim") or hf["hidden_size"] // hf["num_attention_heads"]
    shape = {
        "block_count": hf["num_hidden_layers"],
        "context_length": hf["max_position_embeddings"],
        "embedding_length": hf["hidden_size"],
        "feed_forward_length": hf["intermediate_size"],
        "attention.head_count": hf["num_attention_heads"],
        "attention.head_count_kv": hf["num_key_value_heads"],
        "attention.key_length": head_dim,
        "attention.layer_norm_rms_epsilon": 1e-5,
        "rope.freq_base": 10000.0,
    }
    if name == "mistral":
        shape |= {"attention.sliding_window": 24, "rope.scaling.type": "linear", "rope.scaling.factor": 2.0}
    words = _sentencepiece() if name == "mistral" else _byte_level("qwen2" if architecture == "qwen2" else "gpt-2")
    metadata = {"general.architecture": architecture, "general.alignment": _BLOCK}
    metadata |= {f"{architecture}.{key}": value for key, value in shape.items()} | words
    arrays = seeds.weights(hf)
    vocabulary = len(words["tokenizer.ggml.tokens"])
    for tied in ("model.embed_tokens.weight", "lm_head.weight"):
        if tied in arrays:
            arrays[tied] = arrays[tied][:vocabulary]
    kept = _directory(arrays, FORMATS[name])
    if name == "llama3":
        divisors = np.array(llama3_divisors(RopeScaling("llama3", 8.0), 10000.0, head_dim), np.float32)
        _append(kept, "rope_freqs.weight", divisors, "F32")
    return Gguf(metadata, kept)


def _byte_level(pre: str) -> dict[str, Any]:
    files = seeds.model().files
    described: dict[str, Any] = json.loads(files["tokenizer.json"])
    special = {token["content"]: token["id"] for token in described["added_tokens"]}
    ids = described["model"]["vocab"] | special
    texts = sorted(ids, key=ids.__getitem__)
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": pre,
        "tokenizer.ggml.tokens": texts,
        "tokenizer.ggml.token_type": [3 if text in special else 1 for text in texts],
        "tokenizer.ggml.merges": [],
        "tokenizer.ggml.bos_token_id": special["<|im_start|>"],
        "tokenizer.ggml.eos_token_id": special["<|im_end|>"],
        "tokenizer.chat_template": files["chat_template.jinja"].decode(),
    }


def _sentencepiece() -> dict[str, Any]:
    texts = seeds.sentencepiece_texts()
    return {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": texts,
        "tokenizer.ggml.scores": [-float(at) for at in range(len(texts))],
        "tokenizer.ggml.token_type": [2, 3, 3, *(6 for _ in texts[3:])],
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.unknown_token_id": 0,
        "tokenizer.ggml.add_bos_token": True,
        "tokenizer.ggml.add_space_prefix": True,
        "tokenizer.chat_template": seeds.model().files["chat_template.jinja"].decode(),
    }


def _directory(arrays: seeds.Arrays, format: str) -> Tensors:
    tensors: Tensors = {}
    for name, tensor in arrays.items():
        layer, _, part = name.removeprefix("model.layers.").partition(".")
        module, _, kind = name.rpartition(".")
        own = _FIXED.get(module) or f"blk.{layer}.{_PARTS[part.rpartition('.')[0]]}"
        fits = tensor.ndim == 2 and (tensor.shape[1] % _BLOCK == 0 or not format.startswith("Q"))
        _append(tensors, f"{own}.{kind}", tensor, format if fits else "F32")
    return tensors


def _append(tensors: Tensors, name: str, tensor: Any, format: str) -> None:
    last = next(reversed(tensors.values()), None)
    offset = 0 if last is None else last[2] + -(-len(last[3]) // _BLOCK) * _BLOCK
    kind = GGMLQuantizationType[format]
    tensors[name] = [list(tensor.shape[::-1]), int(kind), offset, quantize(tensor, kind).tobytes()]


def gguf_bytes(metadata: dict[str, Any], tensors: Tensors, version: int = 3) -> bytes:
    """The file. What has no form in it (a nested list, say) is left out."""
    entries = [entry for key, value in metadata.items() if (entry := _entry(key, value)) is not None]
    directory = b"".join(
        _string(name) + struct.pack(f"<I{len(shape)}QIQ", len(shape), *(size % (1 << 64) for size in shape),
                                    format % (1 << 32), offset % (1 << 64))
        for name, (shape, format, offset, _) in tensors.items()
    )  # fmt: skip
    head = (
        b"GGUF" + struct.pack("<IQQ", version % (1 << 32), len(tensors), len(entries)) + b"".join(entries) + directory
    )
    body = head + bytes(-len(head) % _BLOCK)
    for _, _, _, content in tensors.values():
        body += content + bytes(-len(content) % _BLOCK)
    return body


def _string(text: str) -> bytes:
    content = text.encode("utf-8", "surrogatepass")
    return struct.pack("<Q", len(content)) + content


def _entry(key: str, value: Any) -> bytes | None:
    kind = _value(value)
    return None if kind is None else _string(key) + struct.pack("<I", kind[0]) + kind[1]


def _value(value: Any) -> tuple[int, bytes] | None:
    match value:
        case str():
            return 8, _string(value)
        case bool() | float():
            number, form = _SCALAR[type(value)]
            try:
                return number, struct.pack(form, value)
            except OverflowError:
                return 12, struct.pack("<d", value)
        case int():
            return (4, struct.pack("<I", value)) if 0 <= value < 1 << 32 else (11, struct.pack("<q", _signed(value)))
        case list():
            if all(isinstance(item, str) for item in value):
                return 9, struct.pack("<IQ", 8, len(value)) + b"".join(map(_string, value))
            if all(isinstance(item, int) for item in value):
                return 9, struct.pack(f"<IQ{len(value)}q", 11, len(value), *map(_signed, value))
            if all(isinstance(item, float) for item in value):
                return 9, struct.pack(f"<IQ{len(value)}d", 12, len(value), *value)
    return None


def _signed(value: int) -> int:
    return (value + (1 << 63)) % (1 << 64) - (1 << 63)
