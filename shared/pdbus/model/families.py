"""Every kind of model that is served: which config class a config.json means, and which tensors follow from it."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeAlias

from pdbus.model import encoder_config
from pdbus.model.config import ARCHITECTURES, ModelConfig, expected_tensors, from_hf
from pdbus.model.encoder_config import EncoderConfig, Sentence, encoder_from_hf, expected_encoder_tensors
from pdbus.model.refusal import UnsupportedModel
from pdbus.model.sentence import parse_sentence
from pdbus.model.source import parse_json

AnyConfig: TypeAlias = ModelConfig | EncoderConfig
"""Of a model that writes text (the Llama family), or of one that embeds it (the BERT family)."""


def embeds(config: Mapping[str, Any]) -> bool:
    """Whether a config.json is an encoder's."""
    return config.get("model_type") in encoder_config.FAMILIES


def any_from_hf(config: Mapping[str, Any], sentence: Sentence) -> AnyConfig:
    """Raises UnsupportedModel with the reason. `sentence`: of an encoder."""
    if embeds(config):
        return encoder_from_hf(config, sentence)
    family = config.get("model_type")
    if not isinstance(family, str) or family not in ARCHITECTURES:
        served = ", ".join((*ARCHITECTURES, *encoder_config.FAMILIES))
        raise UnsupportedModel(f"model_type {family!r:.80} is not served; these are: {served}")
    return from_hf(config)


def config_of(meta: Mapping[str, bytes]) -> AnyConfig:
    """From a version's files. Raises CheckpointError, UnsupportedModel."""
    return any_from_hf(parse_json(Path("config.json"), meta.get("config.json", b"")), parse_sentence(meta))


def expected(config: AnyConfig) -> dict[str, tuple[int, ...]]:
    """Name (as in Hugging Face checkpoints) -> shape of every tensor of the model."""
    return expected_encoder_tensors(config) if isinstance(config, EncoderConfig) else expected_tensors(config)


def writing(config: AnyConfig) -> ModelConfig:
    """The config of a model that writes text. Raises UnsupportedModel for an encoder."""
    if isinstance(config, EncoderConfig):
        raise UnsupportedModel(f"a {config.family} model embeds texts and writes none: prefill workers alone serve it")
    return config


def embedding(config: AnyConfig) -> EncoderConfig:
    """The config of an encoder. Raises UnsupportedModel for a model that writes text."""
    if not isinstance(config, EncoderConfig):
        raise UnsupportedModel(f"a {config.family} model writes text: it gives no embeddings")
    return config
