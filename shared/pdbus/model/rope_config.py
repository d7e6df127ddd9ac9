"""How positions turn: the part of a config.json that sets RoPE's frequencies."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from pdbus.model.refusal import UnsupportedModel


@dataclass(frozen=True, slots=True)
class RopeScaling:
    """A change of RoPE's frequencies that is the same at every position.

    linear: every frequency divided by `factor`. llama3: frequencies whose wavelength is above
    original_max_positions / low_freq_factor are divided by `factor`, those below original_max_positions /
    high_freq_factor stay, between them it is interpolated (Llama 3.1; transformers `_compute_llama3_parameters`).
    """

    kind: Literal["linear", "llama3"]
    factor: float
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_positions: int = 8192


def rope_from_hf(config: Mapping[str, Any]) -> tuple[float, RopeScaling | None]:
    """(theta, scaling) of a config.json, from `rope_parameters` (transformers 5) or `rope_theta` and `rope_scaling`.

    Dynamic NTK scaling turns by the length of the whole sequence once that exceeds max_position_embeddings, so that a
    cached key would depend on tokens after it; up to that length it equals no scaling. As no request longer than
    max_position_embeddings is admitted, it is served as no scaling, exactly.
    """
    scaling = config.get("rope_parameters")
    if scaling is None:
        scaling = config.get("rope_scaling")
    if scaling is None:
        scaling = {}
    if not isinstance(scaling, Mapping) or any(isinstance(value, Mapping) for value in scaling.values()):
        raise UnsupportedModel("rope scaling must be one set of parameters for all layers")
    theta = _positive(scaling.get("rope_theta", config.get("rope_theta", 10_000.0)), "rope_theta")
    for place in (config, scaling):
        if place.get("partial_rotary_factor", 1.0) != 1.0:
            raise UnsupportedModel("partial_rotary_factor: only heads that turn whole are served")
    kind = scaling.get("rope_type", scaling.get("type", "default"))
    match kind:
        case "default" | "dynamic":
            return theta, None
        case "linear":
            return theta, RopeScaling("linear", _positive(scaling.get("factor"), "rope factor"))
        case "llama3":
            return theta, _llama3(scaling)
    raise UnsupportedModel(f"rope type {kind!r:.80} is not served; these are: default, linear, dynamic, llama3")


def llama3_divisors(scaling: RopeScaling, theta: float, head_dim: int) -> list[float]:
    """By how much each of the head_dim / 2 frequencies is divided, the highest frequency first."""
    divisors = []
    for pair in range(head_dim // 2):
        wavelength = 2 * math.pi * theta ** (2 * pair / head_dim)
        turns = scaling.original_max_positions / wavelength
        # 0 below low_freq_factor turns within the original length, 1 above high_freq_factor
        kept = (turns - scaling.low_freq_factor) / (scaling.high_freq_factor - scaling.low_freq_factor)
        kept = min(1.0, max(0.0, kept))
        divisors.append(1.0 / ((1.0 - kept) / scaling.factor + kept))
    return divisors


def _llama3(scaling: Mapping[str, Any]) -> RopeScaling:
    low = _positive(scaling.get("low_freq_factor"), "low_freq_factor")
    high = _positive(scaling.get("high_freq_factor"), "high_freq_factor")
    original = _positive(scaling.get("original_max_position_embeddings"), "original_max_position_embeddings")
    if not low < high:
        raise UnsupportedModel(f"high_freq_factor {high} must be above low_freq_factor {low}")
    return RopeScaling("llama3", _positive(scaling.get("factor"), "rope factor"), low, high, int(original))


def _positive(value: Any, name: str) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0.0 < value < math.inf:
        raise UnsupportedModel(f"{name} must be a number above 0, not {value!r:.80}")
    return float(value)
