"""Every family equals transformers, in logits and in greedy continuation, with all its fields in use."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from pdbus.model.checkpoint import open_checkpoint
from tests.support.checkpoints import Family, tiny_checkpoint
from tests.support.llama import Runner, load

LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 500000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
VARIANTS: dict[str, tuple[Family, dict[str, Any]]] = {
    "llama": ("llama", {}),
    "llama-biases-untied": ("llama", {"attention_bias": True, "mlp_bias": True, "tie_word_embeddings": False}),
    "llama-3-rope": ("llama", {"rope_parameters": LLAMA3}),
    "llama-linear-rope": ("llama", {"rope_parameters": {"rope_type": "linear", "rope_theta": 1e4, "factor": 4.0}}),
    "llama-one-kv-head": ("llama", {"num_key_value_heads": 1}),
    "llama-no-groups": ("llama", {"num_key_value_heads": 4}),
    "mistral-window": ("mistral", {"sliding_window": 24}),
    "mistral-full": ("mistral", {"sliding_window": None, "head_dim": 8}),
    "qwen2": ("qwen2", {}),
    "qwen2-window-in-one-layer": ("qwen2", {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 1}),
    "qwen3": ("qwen3", {}),
    "qwen3-tied": ("qwen3", {"tie_word_embeddings": True}),
}


@pytest.mark.parametrize("variant", VARIANTS)
def test_equals_transformers(tmp_path: Path, variant: str) -> None:
    torch.set_num_threads(1)
    family, options = VARIANTS[variant]
    path = tiny_checkpoint(tmp_path, family, **options)
    reference = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32, attn_implementation="eager")
    runner = Runner(load(open_checkpoint(str(path))))
    prompt = torch.randint(3, 320, (75,), generator=torch.Generator().manual_seed(1)).tolist()
    with torch.no_grad():
        expected = reference(torch.tensor([prompt])).logits[0]
    assert runner.logits(prompt).sub(expected).abs().max() < 1e-4

    with torch.no_grad():
        whole = reference.generate(
            torch.tensor([prompt[:40]]), max_new_tokens=30, min_new_tokens=30, do_sample=False, eos_token_id=None
        )
    assert runner.greedy(prompt[:40], 30) == whole[0, 40:].tolist()
