"""Tiny random checkpoints in Hugging Face form, made by transformers: the reference that every family is held against.

path = tiny_checkpoint(tmp_path, "qwen3", sliding_window=8, use_sliding_window=True)
reference = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any, Literal

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

Family = Literal["llama", "mistral", "qwen2", "qwen3"]
FAMILIES: tuple[Family, ...] = ("llama", "mistral", "qwen2", "qwen3")

VOCAB_SIZE = 320
SPECIAL_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")  # ids 0, 1, 2
EOS_ID = 2
CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
_CORPUS = (
    "The quick brown fox jumps over the lazy dog while the other dogs look on.",
    "What is the capital of France? The capital of France is Paris, and it has been so for a long time.",
    "Numbers such as 1, 23 and 456 are written here, then the end of the text is near.",
)
_MODELS: dict[Family, tuple[Any, Any, dict[str, Any]]] = {
    "llama": (LlamaConfig, LlamaForCausalLM, {"tie_word_embeddings": True}),
    "mistral": (MistralConfig, MistralForCausalLM, {"sliding_window": 24}),
    "qwen2": (Qwen2Config, Qwen2ForCausalLM, {"tie_word_embeddings": True}),
    "qwen3": (Qwen3Config, Qwen3ForCausalLM, {"head_dim": 32}),
}


def tiny_checkpoint(
    folder: Path,
    family: Family,
    *,
    seed: int = 0,
    dtype: str = "float32",
    shard_bytes: int | None = None,
    **overrides: Any,
) -> Path:
    """Writes `folder`/tiny-`family`, returns it: 2 layers, hidden 64, 4 heads, 2 KV heads, 320 tokens, 512 positions.

    `overrides` go to transformers' config class (`rope_parameters`, `attention_bias`, …). `shard_bytes` splits the
    safetensors. Weights are scaled so that logits spread over several units: greedy continuations have margins.
    """
    config_class, model_class, defaults = _MODELS[family]
    shape = {
        "vocab_size": VOCAB_SIZE,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 512,
        "bos_token_id": 1,
        "eos_token_id": EOS_ID,
        "pad_token_id": 0,
    }
    model = model_class(config_class(**(shape | defaults | overrides)))
    randomise(model, seed)
    path = folder / f"tiny-{family}"
    path.mkdir(parents=True)
    model.to(getattr(torch, dtype)).save_pretrained(path, **({"max_shard_size": shard_bytes} if shard_bytes else {}))
    _save_tokenizer(path)
    return path


def tiny_tokenizer() -> Tokenizer:
    """A byte-level BPE of VOCAB_SIZE tokens, the same in every run."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        special_tokens=list(SPECIAL_TOKENS),
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(_CORPUS, trainer)
    assert tokenizer.get_vocab_size() == VOCAB_SIZE
    return tokenizer


def _save_tokenizer(path: Path) -> None:
    tiny_tokenizer().save(str(path / "tokenizer.json"))
    tokens = {"bos_token": "<|im_start|>", "eos_token": "<|im_end|>", "unk_token": "<|endoftext|>"}
    settings = tokens | {"add_bos_token": False, "tokenizer_class": "PreTrainedTokenizerFast", "model_max_length": 512}
    (path / "tokenizer_config.json").write_text(json.dumps(settings))
    (path / "chat_template.jinja").write_text(CHAT_TEMPLATE)


@torch.no_grad()
def randomise(model: torch.nn.Module, seed: int) -> None:
    """transformers leaves biases at 0 and norms at 1, where a wrong use of them would not show."""
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in model.named_parameters():
        noise = torch.randn(parameter.shape, generator=generator)
        if "norm" in name:
            parameter.copy_(1.0 + 0.2 * noise)
        elif name.endswith("bias"):
            parameter.copy_(0.3 * noise)
        else:
            parameter.copy_(noise * 2.0 / math.sqrt(parameter.shape[-1]))
