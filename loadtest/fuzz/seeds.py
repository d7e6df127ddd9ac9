"""Small sound model folders, as parts that can be changed one by one: every family, number format and tokenizer kind.

From one model alone, the branches for all others would never be reached (measured: a third of them was)."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import numpy as np
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

from loadtest.simulated_version import meta_files
from pdbus.model.encoder_config import Sentence
from pdbus.model.families import any_from_hf, expected

INDEX: Final = "model.safetensors.index.json"
_WEIGHTS: Final = "model.safetensors"
Arrays = dict[str, np.ndarray[Any, np.dtype[np.float32]]]
Shard = tuple[dict[str, Any], bytes]
"""Header and data of a safetensors file."""

_LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
           "original_max_position_embeddings": 64}  # fmt: skip
CONFIGS: Final[dict[str, dict[str, Any]]] = {
    "llama": {},
    "llama3": {"rope_scaling": _LLAMA3, "attention_bias": True, "mlp_bias": True, "eos_token_id": [257, 256]},
    "mistral": {"model_type": "mistral", "architectures": ["MistralForCausalLM"], "sliding_window": 24,
                "rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 1e4}},
    "qwen2": {"model_type": "qwen2", "architectures": ["Qwen2ForCausalLM"], "use_sliding_window": True,
              "sliding_window": 8, "layer_types": ["sliding_attention"], "rope_scaling": {"type": "dynamic"}},
    "qwen3": {"model_type": "qwen3", "architectures": ["Qwen3ForCausalLM"], "head_dim": 4, "tie_word_embeddings": False,
              "use_sliding_window": True, "sliding_window": 8, "max_window_layers": 0, "attention_bias": False},
    "bert": {"model_type": "bert", "architectures": ["BertModel"], "hidden_act": "gelu", "type_vocab_size": 2,
             "pad_token_id": 0, "layer_norm_eps": 1e-12},
}  # fmt: skip
_TYPES = {"llama3": ("F16",), "mistral": ("BF16",), "qwen2": ("F32", "F16", "BF16")}
_SHARDED = ("qwen2",)


@dataclass
class Model:
    """`files`: all of a folder but the weights, by their paths in it."""

    config: dict[str, Any]
    files: dict[str, bytes]
    shards: dict[str, Shard] = field(default_factory=dict)

    @property
    def meta(self) -> dict[str, bytes]:
        """As a version has them."""
        known = ("config.json", "tokenizer.json", "tokenizer_config.json", "generation_config.json")
        return {name: content for name, content in self.files.items() if name in (*known, "chat_template.jinja")}

    def write(self, folder: Path) -> Path:
        for name, content in self.files.items():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            (folder / name).write_bytes(content)
        for name, shard in self.shards.items():
            (folder / name).write_bytes(safetensors_bytes(*shard))
        return folder


def model(name: str = "llama") -> Model:
    """By its name in CONFIGS."""
    config = json.loads(meta_files()["config.json"]) | {"num_hidden_layers": 1} | CONFIGS[name]
    files = meta_files() | {"config.json": json.dumps(config).encode()}
    if name == "bert":
        files |= _sentence_files() | {"tokenizer.json": wordpiece().to_str().encode()}
        del files["chat_template.jinja"], files["generation_config.json"]
    if name == "mistral":
        files["tokenizer.json"] = sentencepiece().to_str().encode()
        settings = {"bos_token": {"content": "<s>"}, "eos_token": "</s>", "unk_token": "<unk>", "add_bos_token": True}
        named = [{"name": "default", "template": files.pop("chat_template.jinja").decode()}, {"name": "tool_use"}]
        files["tokenizer_config.json"] = json.dumps(settings | {"chat_template": named}).encode()
        del files["generation_config.json"]
    shards = _shards(weights(config), _TYPES.get(name, ("F32",)), 2 if name in _SHARDED else 1)
    if len(shards) > 1:
        index = {tensor: file for file, (header, _) in shards.items() for tensor in header if tensor != "__metadata__"}
        files[INDEX] = json.dumps({"metadata": {}, "weight_map": index}).encode()
    return Model(config, files, shards)


def weights(config: dict[str, Any]) -> Arrays:
    random = np.random.default_rng(0)
    shapes = expected(any_from_hf(config, Sentence()))
    return {name: random.standard_normal(shape).astype(np.float32) for name, shape in shapes.items()}


def write_folder(folder: Path) -> Path:
    """A sound model."""
    folder.mkdir(parents=True, exist_ok=True)
    return model().write(folder)


def safetensors_bytes(header: Any, data: bytes, claimed: int | None = None) -> bytes:
    """`claimed`: the header's length as the file tells it, where that is not so."""
    head = json.dumps(header).encode()
    return (len(head) if claimed is None else claimed % (1 << 64)).to_bytes(8, "little") + head + data


def _shards(tensors: Arrays, types: tuple[str, ...], count: int) -> dict[str, Shard]:
    found: dict[str, Shard] = {}
    for part in range(count):
        header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
        data = b""
        for at, (name, tensor) in enumerate(list(tensors.items())[part::count]):
            dtype = types[at % len(types)]
            content = _content(tensor, dtype)
            end = len(data) + len(content)
            header[name] = {"dtype": dtype, "shape": list(tensor.shape), "data_offsets": [len(data), end]}
            data += content
        found[_WEIGHTS if count == 1 else f"model-{part + 1:05}-of-{count:05}.safetensors"] = header, data
    return found


def _content(tensor: np.ndarray[Any, np.dtype[np.float32]], dtype: str) -> bytes:
    if dtype == "BF16":
        return bytes((tensor.view(np.uint32) >> 16).astype("<u2").tobytes())
    return bytes(tensor.astype({"F32": "<f4", "F16": "<f2"}[dtype]).tobytes())


def _sentence_files() -> dict[str, bytes]:
    kinds = [("Transformer", ""), ("Pooling", "1_Pooling"), ("Normalize", "2_Normalize")]
    modules = [{"path": folder, "type": f"sentence_transformers.models.{kind}"} for kind, folder in kinds]
    contents = {
        "modules.json": modules,
        "1_Pooling/config.json": {"pooling_mode_cls_token": False, "pooling_mode_mean_tokens": True},
        "sentence_bert_config.json": {"max_seq_length": 40, "do_lower_case": False},
        "config_sentence_transformers.json": {"prompts": {"query": ""}, "default_prompt_name": None},
    }
    return {name: json.dumps(content).encode() for name, content in contents.items()}


def sentencepiece_texts() -> list[str]:
    """A vocabulary with a token for each byte."""
    return ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]


def sentencepiece() -> Tokenizer:
    texts = sentencepiece_texts()
    vocab = {text: index for index, text in enumerate(texts)}
    unknown, *_ = texts
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[], unk_token=unknown, fuse_unk=True, byte_fallback=True))
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    steps: list[Any] = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    tokenizer.decoder = decoders.Sequence(steps)
    tokenizer.add_special_tokens(texts[:3])
    return tokenizer


def wordpiece() -> Tokenizer:
    """BERT's kind, with the truncation and padding that training leaves behind."""
    texts = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", *"abcdefgh", *(f"##{letter}" for letter in "abcdefgh")]
    tokenizer = Tokenizer(models.WordPiece(vocab={text: at for at, text in enumerate(texts)}, unk_token=texts[1]))
    tokenizer.normalizer = normalizers.BertNormalizer(lowercase=True)
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", special_tokens=[("[CLS]", 2), ("[SEP]", 3)]
    )
    tokenizer.enable_truncation(max_length=8)
    tokenizer.enable_padding(length=8)
    return tokenizer
