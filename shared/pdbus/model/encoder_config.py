"""The shape of a text encoder of the BERT family, read from config.json, and how its vectors become one per text.

What sentence-transformers keeps in files of its own (model/sentence.py) comes as `Sentence`: it is part of a version
like any weight. No torch here.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, get_args

from pdbus.model.config_fields import Fields
from pdbus.model.refusal import UnsupportedModel

EncoderFamily = Literal["bert", "roberta", "xlm-roberta"]
FAMILIES: tuple[EncoderFamily, ...] = get_args(EncoderFamily)
Pooling = Literal["mean", "cls"]


@dataclass(frozen=True, slots=True)
class Sentence:
    """How the tokens' vectors of a text become its own. The defaults are what a model without a word on it gets."""

    pooling: Pooling = "mean"
    """The mean over all tokens, the special ones among them; or the first token's vector."""
    normalize: bool = False
    """Vectors have length 1."""
    max_tokens: int | None = None
    """None: as many as there are positions."""


@dataclass(frozen=True, slots=True)
class EncoderConfig:
    """What the forward pass needs to know. The activation is the exact GELU, norms come after each residual sum."""

    family: EncoderFamily
    vocab_size: int
    hidden_size: int
    """Dimensions of a vector."""
    intermediate_size: int
    layers: int
    heads: int
    position_rows: int
    """Of the table of learnt positions."""
    first_position: int
    """Row of a text's first token: RoBERTa leaves out those up to its padding token's id."""
    token_types: int
    norm_eps: float
    sentence: Sentence

    @property
    def max_tokens(self) -> int:
        """Of one text, special tokens among them."""
        most = self.position_rows - self.first_position
        return most if self.sentence.max_tokens is None else min(most, self.sentence.max_tokens)


def encoder_from_hf(config: Mapping[str, Any], sentence: Sentence) -> EncoderConfig:
    """Reads the content of a config.json. Raises UnsupportedModel with the reason.

    Where a key is absent, the default of transformers' config class applies."""
    family = config.get("model_type")
    if family not in FAMILIES:
        raise UnsupportedModel(f"model_type {family!r:.80} is not an encoder that is served: {', '.join(FAMILIES)} are")
    fields = Fields(config)
    for name, only in (("hidden_act", "gelu"), ("position_embedding_type", "absolute")):
        if config.get(name, only) not in (only, None):
            raise UnsupportedModel(f"{name} {config[name]!r:.80}: only {only} is served")
    if fields.flag("is_decoder") or fields.flag("add_cross_attention"):
        raise UnsupportedModel("is_decoder, add_cross_attention: it is not an encoder")
    if config.get("quantization_config") is not None:
        raise UnsupportedModel("quantization_config: a quantised encoder is not served")
    heads = fields.integer("num_attention_heads", most=1024, default=12)
    hidden_size = fields.integer("hidden_size", most=1 << 14, default=768)
    if hidden_size % heads:
        raise UnsupportedModel(f"hidden_size {hidden_size} is not a multiple of num_attention_heads {heads}")
    padding = fields.integer("pad_token_id", least=0, most=1 << 22, default=0 if family == "bert" else 1)
    made = EncoderConfig(
        family=family,
        vocab_size=fields.integer("vocab_size", most=1 << 22, default=30522 if family == "bert" else 50265),
        hidden_size=hidden_size,
        intermediate_size=fields.integer("intermediate_size", most=1 << 20, default=3072),
        layers=fields.integer("num_hidden_layers", most=1024, default=12),
        heads=heads,
        position_rows=fields.integer("max_position_embeddings", most=1 << 20, default=512),
        first_position=0 if family == "bert" else padding + 1,
        token_types=fields.integer("type_vocab_size", most=1024, default=2),
        norm_eps=fields.number("layer_norm_eps", most=1.0, default=1e-12),
        sentence=sentence,
    )
    if made.max_tokens < 3:
        raise UnsupportedModel(f"max_position_embeddings {made.position_rows} leaves no room for a text")
    return made


def expected_encoder_tensors(config: EncoderConfig) -> dict[str, tuple[int, ...]]:
    """Name (as in Hugging Face checkpoints) -> shape of every tensor. Linear weights are [out, in]."""
    hidden, inner = config.hidden_size, config.intermediate_size
    tensors: dict[str, tuple[int, ...]] = {
        "embeddings.word_embeddings.weight": (config.vocab_size, hidden),
        "embeddings.position_embeddings.weight": (config.position_rows, hidden),
        "embeddings.token_type_embeddings.weight": (config.token_types, hidden),
        **_affine("embeddings.LayerNorm", (hidden,)),
    }
    for index in range(config.layers):
        layer = f"encoder.layer.{index}"
        for name in ("query", "key", "value"):
            tensors |= _affine(f"{layer}.attention.self.{name}", (hidden, hidden))
        tensors |= _affine(f"{layer}.attention.output.dense", (hidden, hidden))
        tensors |= _affine(f"{layer}.attention.output.LayerNorm", (hidden,))
        tensors |= _affine(f"{layer}.intermediate.dense", (inner, hidden))
        tensors |= _affine(f"{layer}.output.dense", (hidden, inner))
        tensors |= _affine(f"{layer}.output.LayerNorm", (hidden,))
    return tensors


def _affine(name: str, shape: tuple[int, ...]) -> dict[str, tuple[int, ...]]:
    return {f"{name}.weight": shape, f"{name}.bias": shape[:1]}
