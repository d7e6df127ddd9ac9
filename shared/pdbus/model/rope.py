"""Rotary position embedding (RoFormer, arXiv 2104.09864) in the half-split form of Hugging Face checkpoints.

Element i of a head turns together with element i + head_dim / 2, by position times the frequency of i.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from pdbus.model.config import ModelConfig
from pdbus.model.rope_config import RopeScaling


@dataclass(frozen=True, slots=True)
class Rotation:
    """cos and signed sin of each token's angles, both [tokens, 1, head_dim]; made once for all layers of a step."""

    cos: Tensor
    sin: Tensor

    def __call__(self, x: Tensor) -> Tensor:
        """Turns x [tokens, heads, head_dim]."""
        return torch.addcmul(x * self.cos, x.roll(x.shape[-1] // 2, dims=-1), self.sin)


class Rope:
    def __init__(self, config: ModelConfig, device: torch.device) -> None:
        self._frequencies = frequencies(config).to(device)

    def at(self, positions: Tensor) -> Rotation:
        """The rotation of tokens at `positions` [tokens]."""
        angles = positions[:, None].float() * self._frequencies  # [tokens, head_dim / 2]
        cos, sin = angles.cos(), angles.sin()
        return Rotation(torch.cat((cos, cos), -1)[:, None], torch.cat((-sin, sin), -1)[:, None])


def frequencies(config: ModelConfig) -> Tensor:
    """Radians per position of each pair, [head_dim / 2] in fp32."""
    exponents = torch.arange(0, config.head_dim, 2, dtype=torch.float32) / config.head_dim
    plain = 1.0 / config.rope_theta**exponents
    match config.rope_scaling:
        case None:
            return plain
        case RopeScaling(kind="linear", factor=factor):
            return plain / factor
        case scaling:
            return _llama3(plain, scaling)


def _llama3(plain: Tensor, scaling: RopeScaling) -> Tensor:
    """Llama 3.1: long waves are stretched by `factor`, short ones stay, those between are blended by wavelength."""
    turns = scaling.original_max_positions * plain / (2 * math.pi)  # within the original context
    blend = (turns - scaling.low_freq_factor) / (scaling.high_freq_factor - scaling.low_freq_factor)
    blend = blend.clamp(0.0, 1.0)
    return (1.0 - blend) * plain / scaling.factor + blend * plain
