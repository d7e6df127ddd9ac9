"""Rotary position embedding (RoFormer, arXiv 2104.09864) in the half-split form of Hugging Face checkpoints.

Element i of a head turns together with element i + head_dim / 2, by position times the frequency of i.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from pdbus.model.config import ModelConfig
from pdbus.model.frequencies import frequencies


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
        self._frequencies = torch.from_numpy(frequencies(config)).to(device)

    def at(self, positions: Tensor) -> Rotation:
        """The rotation of tokens at `positions` [tokens]."""
        angles = positions[:, None].float() * self._frequencies  # [tokens, head_dim / 2]
        cos, sin = angles.cos(), angles.sin()
        return Rotation(torch.cat((cos, cos), -1)[:, None], torch.cat((-sin, sin), -1)[:, None])
