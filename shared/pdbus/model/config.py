"""The shape of a model of the Llama family: read from a Hugging Face config.json, and which tensors follow from it.

One dataclass describes every family without naming it anywhere else: the brands differ only in biases, the norms of q
and k, the head size, the sliding window and the rotation. A config that asks for anything else is refused, never
served approximately.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from pdbus.model.config_fields import Fields
from pdbus.model.refusal import UnsupportedModel
from pdbus.model.rope_config import RopeScaling, rope_from_hf

Family = Literal["llama", "mistral", "qwen2", "qwen3"]

ARCHITECTURES: dict[Family, str] = {
    "llama": "LlamaForCausalLM",  # Llama 1 to 3.x, SmolLM and SmolLM2
    "mistral": "MistralForCausalLM",
    "qwen2": "Qwen2ForCausalLM",  # Qwen1.5, Qwen2, Qwen2.5
    "qwen3": "Qwen3ForCausalLM",
}


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """What the forward pass needs to know. The activation is SiLU (SwiGLU) and the norm RMSNorm in every family."""

    family: Family
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    max_positions: int
    """Tokens in prompt and answer together; positions run from 0 to max_positions - 1."""
    rope_theta: float
    rope_scaling: RopeScaling | None
    rms_norm_eps: float
    tied_embeddings: bool
    """The LM head is the embedding: no tensor `lm_head.weight`."""
    attention_bias: bool
    """Biases on q, k and v."""
    attention_out_bias: bool
    mlp_bias: bool
    """Biases on gate, up and down."""
    qk_norm: bool
    """RMSNorm over head_dim of each head of q and k, before the rotation."""
    sliding_window: int | None
    """In a windowed layer a query at position p sees the positions above p - sliding_window, itself among them."""
    windowed_layers: tuple[bool, ...]
    """Per layer: does the sliding window apply? All False where there is none."""

    def window(self, layer: int) -> int | None:
        """The sliding window of one layer, or None for full attention."""
        return self.sliding_window if self.windowed_layers[layer] else None


def from_hf(config: Mapping[str, Any]) -> ModelConfig:
    """Reads the content of a config.json (of any transformers version). Raises UnsupportedModel with the reason.

    Where a key is absent, the default of transformers' config class for that family applies, since
    `save_pretrained` may leave out what equals it.
    """
    family = _family(config)
    fields = Fields(config)
    heads = fields.integer("num_attention_heads", most=1024)
    hidden_size = fields.integer("hidden_size", most=1 << 16)
    layers = fields.integer("num_hidden_layers", most=1024)
    kv_heads = fields.integer("num_key_value_heads", most=1024, default={"llama": heads, "mistral": 8}.get(family, 32))
    head_dim = fields.integer("head_dim", most=1024, default=128 if family == "qwen3" else hidden_size // heads)
    if heads % kv_heads:
        raise UnsupportedModel(f"num_attention_heads {heads} is not a multiple of num_key_value_heads {kv_heads}")
    if head_dim % 2:
        raise UnsupportedModel(f"head_dim {head_dim} is odd: RoPE rotates pairs")
    if config.get("hidden_act", "silu") != "silu":
        raise UnsupportedModel(f"hidden_act {config['hidden_act']!r:.80}: only silu is served")
    max_positions = fields.integer("max_position_embeddings", most=1 << 24)
    rope_theta, rope_scaling = rope_from_hf(config)
    optional_bias = family in ("llama", "qwen3") and fields.flag("attention_bias")
    sliding_window, windowed_layers = _windows(family, fields, layers)
    return ModelConfig(
        family=family,
        vocab_size=fields.integer("vocab_size", most=1 << 22),
        hidden_size=hidden_size,
        intermediate_size=fields.integer("intermediate_size", most=1 << 20),
        layers=layers,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        max_positions=max_positions,
        rope_theta=rope_theta,
        rope_scaling=rope_scaling,
        rms_norm_eps=fields.number("rms_norm_eps", most=1.0, default=1e-6),
        tied_embeddings=fields.flag("tie_word_embeddings"),
        attention_bias=optional_bias or family == "qwen2",
        attention_out_bias=optional_bias,
        mlp_bias=family == "llama" and fields.flag("mlp_bias"),
        qk_norm=family == "qwen3",
        sliding_window=sliding_window,
        windowed_layers=windowed_layers,
    )


def expected_tensors(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Name (as in Hugging Face checkpoints) -> shape of every tensor of the model, from the embedding up.

    Linear weights are [out_features, in_features].
    """
    hidden, inner = config.hidden_size, config.intermediate_size
    q_rows, kv_rows = config.heads * config.head_dim, config.kv_heads * config.head_dim
    layer: dict[str, tuple[int, ...]] = {"input_layernorm.weight": (hidden,)}
    for name, rows in (("q_proj", q_rows), ("k_proj", kv_rows), ("v_proj", kv_rows)):
        layer |= _linear(f"self_attn.{name}", rows, hidden, bias=config.attention_bias)
    if config.qk_norm:
        layer |= {"self_attn.q_norm.weight": (config.head_dim,), "self_attn.k_norm.weight": (config.head_dim,)}
    layer |= _linear("self_attn.o_proj", hidden, q_rows, bias=config.attention_out_bias)
    layer["post_attention_layernorm.weight"] = (hidden,)
    layer |= _linear("mlp.gate_proj", inner, hidden, bias=config.mlp_bias)
    layer |= _linear("mlp.up_proj", inner, hidden, bias=config.mlp_bias)
    layer |= _linear("mlp.down_proj", hidden, inner, bias=config.mlp_bias)

    tensors: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (config.vocab_size, hidden)}
    for index in range(config.layers):
        tensors |= {f"model.layers.{index}.{name}": shape for name, shape in layer.items()}
    tensors["model.norm.weight"] = (hidden,)
    if not config.tied_embeddings:
        tensors["lm_head.weight"] = (config.vocab_size, hidden)
    return tensors


def _linear(name: str, rows: int, columns: int, *, bias: bool) -> dict[str, tuple[int, ...]]:
    weight: dict[str, tuple[int, ...]] = {f"{name}.weight": (rows, columns)}
    return weight | {f"{name}.bias": (rows,)} if bias else weight


def _family(config: Mapping[str, Any]) -> Family:
    family, architectures = config.get("model_type"), config.get("architectures")
    if not isinstance(family, str) or family not in ARCHITECTURES:
        raise UnsupportedModel(f"model_type {family!r:.80} is not served; these are: {', '.join(ARCHITECTURES)}")
    known = ARCHITECTURES[family]
    if architectures is not None and architectures != [known]:
        raise UnsupportedModel(f"architectures {architectures!r:.80} is not served for {family}: expected [{known!r}]")
    if config.get("quantization_config") is not None:
        raise UnsupportedModel("quantization_config: a quantised checkpoint is served from GGUF only")
    return family


def _windows(family: Family, fields: Fields, layers: int) -> tuple[int | None, tuple[bool, ...]]:
    """Mistral windows every layer; Qwen those from max_window_layers on, or those that layer_types names."""
    full = (None, (False,) * layers)
    layer_types = fields.config.get("layer_types")
    if layer_types is not None and (not isinstance(layer_types, list) or len(layer_types) != layers):
        raise UnsupportedModel(f"layer_types must be a list of {layers} kinds of attention")
    if family == "mistral":
        if layer_types is not None:
            raise UnsupportedModel("layer_types in a Mistral config: its layers share one kind of attention")
        if "sliding_window" in fields.config and fields.config["sliding_window"] is None:
            return full
        return fields.integer("sliding_window", most=1 << 24, default=4096), (True,) * layers
    if family == "llama" or not fields.flag("use_sliding_window") or fields.config.get("sliding_window", 0) is None:
        if layer_types is not None and any(kind != "full_attention" for kind in layer_types):
            raise UnsupportedModel("layer_types asks for other than full_attention, but there is no sliding window")
        return full
    window = fields.integer("sliding_window", most=1 << 24, default=4096)
    if layer_types is None:
        first = fields.integer("max_window_layers", least=0, most=1 << 16, default=28)
        return window, tuple(index >= first for index in range(layers))
    kinds = {"full_attention": False, "sliding_attention": True}
    unknown = [kind for kind in layer_types if not isinstance(kind, str) or kind not in kinds]
    if unknown:
        raise UnsupportedModel(f"layer_types: {unknown[0]!r:.80} is not served; these are: {', '.join(kinds)}")
    return window, tuple(kinds[kind] for kind in layer_types)
