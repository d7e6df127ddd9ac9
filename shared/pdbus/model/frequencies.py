"""The frequencies of rotary position embedding (RoFormer, arXiv 2104.09864), alike for every engine. No torch here."""

from __future__ import annotations

import math
from typing import Any, TypeAlias

import numpy as np

from pdbus.model.config import ModelConfig
from pdbus.model.rope_config import RopeScaling

Array: TypeAlias = "np.ndarray[Any, Any]"


def frequencies(config: ModelConfig) -> Array:
    """Radians per position of each pair, [head_dim / 2] in fp32.

    In the order of operations of transformers, each rounded to fp32; powers by the C library, so that they depend on
    no instruction set."""
    exponents = np.arange(0, config.head_dim, 2, dtype=np.float32) / np.float32(config.head_dim)
    powers = np.array([config.rope_theta ** float(exponent) for exponent in exponents], np.float32)
    plain = np.float32(1.0) / powers
    match config.rope_scaling:
        case None:
            return plain
        case RopeScaling(kind="linear", factor=factor):
            return plain / np.float32(factor)
        case scaling:
            return _llama3(plain, scaling)


def _llama3(plain: Array, scaling: RopeScaling) -> Array:
    """Llama 3.1: long waves are stretched by `factor`, short ones stay, those between are blended by wavelength."""
    turns = plain * scaling.original_max_positions / (2 * math.pi)  # within the original context
    blend = (turns - scaling.low_freq_factor) / (scaling.high_freq_factor - scaling.low_freq_factor)
    blend = np.clip(blend, 0.0, 1.0)
    scaled: Array = (1.0 - blend) * plain / scaling.factor + blend * plain
    return scaled
