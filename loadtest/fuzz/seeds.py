"""Small sound files, as parts that can be changed one by one: a model folder, and a GGUF file."""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

import numpy as np

from loadtest.simulated_version import meta_files
from pdbus.model.config import expected_tensors, from_hf

_NAMES = {"model.embed_tokens.weight": "token_embd.weight", "model.norm.weight": "output_norm.weight"}
_PARTS = {
    "input_layernorm": "attn_norm", "self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v", "self_attn.o_proj": "attn_output", "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up", "mlp.down_proj": "ffn_down",
}  # fmt: skip
_SCALAR = {bool: (7, "<?"), int: (4, "<I"), float: (6, "<f")}


def config() -> dict[str, Any]:
    found: dict[str, Any] = json.loads(meta_files()["config.json"])
    return found | {"num_hidden_layers": 1}


def weights() -> dict[str, np.ndarray[Any, np.dtype[np.float32]]]:
    random = np.random.default_rng(0)
    shapes = expected_tensors(from_hf(config()))
    return {name: random.standard_normal(shape).astype(np.float32) for name, shape in shapes.items()}


def folder_files() -> dict[str, bytes]:
    """All of a model folder but the weights."""
    return meta_files() | {"config.json": json.dumps(config()).encode()}


def safetensors_parts() -> tuple[dict[str, Any], bytes]:
    """Header and data."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    data = b""
    for name, tensor in weights().items():
        end = len(data) + tensor.nbytes
        header[name] = {"dtype": "F32", "shape": list(tensor.shape), "data_offsets": [len(data), end]}
        data += tensor.tobytes()
    return header, data


def safetensors_bytes(header: Any, data: bytes, claimed: int | None = None) -> bytes:
    """`claimed`: the header's length as the file tells it, where that is not so."""
    head = json.dumps(header).encode()
    return (len(head) if claimed is None else claimed % (1 << 64)).to_bytes(8, "little") + head + data


def write_folder(folder: Path) -> Path:
    """A sound model."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, content in folder_files().items():
        (folder / name).write_bytes(content)
    (folder / "model.safetensors").write_bytes(safetensors_bytes(*safetensors_parts()))
    return folder


def gguf_parts() -> tuple[dict[str, Any], dict[str, list[Any]]]:
    """Metadata, and of each tensor [shape, format, offset, bytes]."""
    hf = config()
    vocabulary: dict[str, Any] = json.loads(meta_files()["tokenizer.json"])
    special = {token["content"]: token["id"] for token in vocabulary["added_tokens"]}
    ids = vocabulary["model"]["vocab"] | special
    texts = sorted(ids, key=ids.__getitem__)
    metadata = {
        "general.architecture": "llama",
        "llama.block_count": hf["num_hidden_layers"],
        "llama.context_length": hf["max_position_embeddings"],
        "llama.embedding_length": hf["hidden_size"],
        "llama.feed_forward_length": hf["intermediate_size"],
        "llama.attention.head_count": hf["num_attention_heads"],
        "llama.attention.head_count_kv": hf["num_key_value_heads"],
        "llama.attention.layer_norm_rms_epsilon": 1e-5,
        "llama.rope.freq_base": 10000.0,
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "gpt-2",
        "tokenizer.ggml.tokens": texts,
        "tokenizer.ggml.token_type": [3 if text in special else 1 for text in texts],
        "tokenizer.ggml.merges": [],
        "tokenizer.ggml.bos_token_id": special["<|im_start|>"],
        "tokenizer.ggml.eos_token_id": special["<|im_end|>"],
        "tokenizer.chat_template": meta_files()["chat_template.jinja"].decode(),
    }
    tensors, at = {}, 0
    for name, tensor in weights().items():
        layer, _, part = name.removeprefix("model.layers.").partition(".")
        named = _NAMES.get(name) or f"blk.{layer}.{_PARTS[part.removesuffix('.weight')]}.weight"
        tensors[named] = [list(tensor.shape[::-1]), 0, at, tensor.tobytes()]
        at += -(-tensor.nbytes // 32) * 32
    return metadata, tensors


def gguf_bytes(metadata: dict[str, Any], tensors: dict[str, list[Any]], version: int = 3) -> bytes:
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
    body = head + bytes(-len(head) % 32)
    for _, _, _, content in tensors.values():
        body += content + bytes(-len(content) % 32)
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
    return None


def _signed(value: int) -> int:
    return (value + (1 << 63)) % (1 << 64) - (1 << 63)
