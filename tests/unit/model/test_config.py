from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import AutoConfig, AutoModelForCausalLM, LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from pdbus.model.config import expected_tensors, from_hf
from pdbus.model.refusal import UnsupportedModel
from pdbus.model.rope_config import RopeScaling, llama3_divisors

SHAPE = {
    "vocab_size": 320,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
}
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 256,
}


def hf(family: str = "llama", **fields: Any) -> dict[str, Any]:
    return {"model_type": family, **SHAPE, **fields}


@pytest.mark.parametrize(
    "config",
    [
        hf("llama", tie_word_embeddings=True),
        hf("llama", attention_bias=True, mlp_bias=True),
        hf("llama", head_dim=8),
        hf("mistral"),
        hf("qwen2"),
        hf("qwen3"),
        hf("qwen3", head_dim=32, attention_bias=True, tie_word_embeddings=True),
    ],
)
def test_the_tensors_are_those_of_transformers(config: dict[str, Any]) -> None:
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**config))
    reference = {name: tuple(tensor.shape) for name, tensor in model.named_parameters()}
    assert expected_tensors(from_hf(config)) == reference


def test_absent_fields_mean_what_they_mean_to_transformers() -> None:
    for family in ("llama", "mistral", "qwen2", "qwen3"):
        fields = hf(family, num_attention_heads=32)
        del fields["num_key_value_heads"]
        ours, theirs = from_hf(fields), AutoConfig.for_model(**fields)
        head_dim = getattr(theirs, "head_dim", theirs.hidden_size // theirs.num_attention_heads)
        assert ours.kv_heads == theirs.num_key_value_heads
        assert ours.head_dim == head_dim
        assert ours.rms_norm_eps == theirs.rms_norm_eps
        assert ours.tied_embeddings == theirs.tie_word_embeddings
        assert ours.sliding_window == theirs.sliding_window if family == "mistral" else ours.sliding_window is None


def test_rope_is_read_in_the_old_form_and_the_new() -> None:
    old = from_hf(hf(rope_theta=5e5, rope_scaling={**LLAMA3}))
    new = from_hf(hf(rope_parameters={**LLAMA3, "rope_theta": 5e5}))
    assert old == new
    assert old.rope_theta == 5e5
    assert old.rope_scaling == RopeScaling("llama3", 8.0, 1.0, 4.0, 256)
    assert from_hf(hf(rope_scaling={"type": "linear", "factor": 2})).rope_scaling == RopeScaling("linear", 2.0)


def test_dynamic_scaling_is_none_up_to_the_positions_that_are_served() -> None:
    scaled = {"rope_parameters": {"rope_type": "dynamic", "factor": 4.0, "rope_theta": 1e4}}
    assert from_hf(hf(**scaled)) == from_hf(hf())
    frequencies, factor = ROPE_INIT_FUNCTIONS["dynamic"](LlamaConfig(**SHAPE, **scaled), "cpu", seq_len=512)
    plain = 1e4 ** (-torch.arange(0, 16, 2).float() / 16)
    assert factor == 1.0
    torch.testing.assert_close(frequencies, plain)


def test_the_divisors_of_llama_3_are_those_of_transformers() -> None:
    config = LlamaConfig(**SHAPE, head_dim=64, rope_parameters={**LLAMA3, "rope_theta": 1e4})
    frequencies, _ = ROPE_INIT_FUNCTIONS["llama3"](config, "cpu")
    scaling = from_hf(hf(rope_scaling=LLAMA3)).rope_scaling
    assert scaling is not None
    divisors = torch.tensor(llama3_divisors(scaling, 1e4, 64))
    torch.testing.assert_close(1e4 ** (-torch.arange(0, 64, 2) / 64) / divisors, frequencies)
    assert len({round(float(value), 6) for value in divisors}) > 4, "the smooth part is covered"


def test_sliding_windows_per_layer() -> None:
    assert from_hf(hf("mistral", sliding_window=8)).windowed_layers == (True, True, True)
    assert from_hf(hf("mistral", sliding_window=None)).windowed_layers == (False, False, False)
    windowed = {"use_sliding_window": True, "sliding_window": 8}
    qwen = from_hf(hf("qwen2", **windowed, max_window_layers=1))
    assert [qwen.window(layer) for layer in range(3)] == [None, 8, 8]
    named = ["sliding_attention", "full_attention", "sliding_attention"]
    assert from_hf(hf("qwen3", **windowed, layer_types=named)).windowed_layers == (True, False, True)
    assert from_hf(hf("qwen3", sliding_window=8)).sliding_window is None


@pytest.mark.parametrize(
    ("config", "reason"),
    [
        ({}, "model_type None is not served"),
        (hf("gpt2"), "model_type 'gpt2'"),
        (hf(model_type=["llama"]), "model_type"),
        (hf(architectures=["LlamaForSequenceClassification"]), "architectures"),
        (hf(quantization_config={"quant_method": "gptq"}), "quantization_config"),
        (hf(hidden_act="gelu"), "hidden_act"),
        (hf(num_hidden_layers=10**9), "num_hidden_layers must be an integer from 1 to"),
        (hf(vocab_size=True), "vocab_size"),
        (hf(hidden_size="64"), "hidden_size"),
        (hf(num_key_value_heads=3), "not a multiple"),
        (hf(head_dim=15), "odd"),
        (hf(max_position_embeddings=None), "max_position_embeddings is missing"),
        (hf(rms_norm_eps=0), "rms_norm_eps"),
        (hf(rope_theta=math.inf), "rope_theta"),
        (hf(rope_scaling={"rope_type": "yarn", "factor": 4.0}), "rope type 'yarn'"),
        (hf(rope_scaling={"rope_type": "linear"}), "rope factor"),
        (hf(rope_scaling={"rope_type": "llama3", "factor": 8.0}), "low_freq_factor"),
        (hf(rope_parameters={"full_attention": {"rope_type": "default"}}), "one set of parameters"),
        (hf(partial_rotary_factor=0.5), "partial_rotary_factor"),
        (hf("qwen2", layer_types=["sliding_attention"] * 3), "there is no sliding window"),
        (hf("qwen2", layer_types=["full_attention"]), "list of 3"),
        (hf("qwen3", use_sliding_window=True, layer_types=[[], 1, "linear_attention"]), "is not served"),
        (hf("mistral", layer_types=["full_attention"] * 3), "layer_types in a Mistral"),
    ],
)
def test_what_would_be_computed_otherwise_is_refused(config: dict[str, Any], reason: str) -> None:
    with pytest.raises(UnsupportedModel, match=reason):
        from_hf(config)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
    max_leaves=6,
)
FIELDS = [*SHAPE, "model_type", "architectures", "hidden_act", "rope_scaling", "rope_parameters", "rope_theta",
          "layer_types", "sliding_window", "use_sliding_window", "head_dim", "tie_word_embeddings"]  # fmt: skip


@given(
    st.sampled_from(["llama", "mistral", "qwen2", "qwen3"]), st.dictionaries(st.sampled_from(FIELDS), JSON, max_size=3)
)
def test_any_config_is_read_or_refused(family: str, garbage: dict[str, Any]) -> None:
    try:
        config = from_hf(hf(family) | garbage)
    except UnsupportedModel as refusal:
        assert refusal.message  # noqa: PT017 - both outcomes are fine
    else:
        assert config.heads % config.kv_heads == 0
        assert len(config.windowed_layers) == config.layers
