"""Weights in fewer bits: pure functions of one tensor, so that an equal tensor gives equal bytes on every machine.

- rows: int8 with an fp32 scale per output channel, for rotated weights with activations quantised per row;
- groups of 32 inputs: 4 bits with scale and least value, or int8 with a scale. What a GGUF file holds as Q4_1 and Q8_0
  comes back exactly from its fp32 values.
"""

from __future__ import annotations

from typing import Any, NamedTuple, TypeAlias

import numpy as np

Array: TypeAlias = "np.ndarray[Any, Any]"

GROUP = 32


class Rows8(NamedTuple):
    weight: Array
    """int8 [outputs, inputs], -127 to 127."""
    scale: Array
    """fp32 [outputs]"""


class Groups4(NamedTuple):
    codes: Array
    """uint8 [outputs, inputs], 0 to 15: weight = scale * code + least."""
    scale: Array
    """fp16 [outputs, inputs / 32]"""
    least: Array
    """fp16 [outputs, inputs / 32]"""


class Groups8(NamedTuple):
    weight: Array
    """int8 [outputs, inputs], -127 to 127."""
    scale: Array
    """fp16 [outputs, inputs / 32]"""


def rows8(weight: Array) -> Rows8:
    """weight fp32 [outputs, inputs]."""
    scale = (np.abs(weight).max(1) / np.float32(127.0)).astype(np.float32)
    return Rows8(_rounded(weight, scale[:, None], -127, 127).astype(np.int8), scale)


def groups4(weight: Array) -> Groups4:
    """weight fp32 [outputs, inputs], inputs a multiple of 32."""
    grouped = _grouped(weight)
    least = grouped.min(2).astype(np.float16)
    scale = ((grouped.max(2) - grouped.min(2)) / np.float32(15.0)).astype(np.float16)
    codes = _rounded(grouped - least[..., None].astype(np.float32), scale[..., None].astype(np.float32), 0, 15)
    return Groups4(codes.astype(np.uint8).reshape(weight.shape), scale, least)


def groups8(weight: Array) -> Groups8:
    """weight fp32 [outputs, inputs], inputs a multiple of 32."""
    grouped = _grouped(weight)
    scale = (np.abs(grouped).max(2) / np.float32(127.0)).astype(np.float16)
    codes = _rounded(grouped, scale[..., None].astype(np.float32), -127, 127)
    return Groups8(codes.astype(np.int8).reshape(weight.shape), scale)


def widened(quantised: Rows8 | Groups4 | Groups8) -> Array:
    """The fp32 weight that the kernels compute with."""
    match quantised:
        case Rows8(weight, scale):
            return weight * scale[:, None]
        case Groups4(codes, scale, least):
            grouped = _grouped(codes) * scale[..., None].astype(np.float32) + least[..., None].astype(np.float32)
            return grouped.reshape(codes.shape)
        case Groups8(weight, scale):
            return (_grouped(weight) * scale[..., None].astype(np.float32)).reshape(weight.shape)


def _grouped(weight: Array) -> Array:
    """[outputs, inputs] -> [outputs, groups, 32]."""
    return weight.reshape(len(weight), -1, GROUP)


def _rounded(values: Array, scale: Array, lowest: int, highest: int) -> Array:
    """values / scale to the nearest whole number (half to even); 0 where the scale is."""
    steps = np.divide(values, scale, out=np.zeros_like(values), where=scale != 0)
    rounded: Array = np.clip(np.rint(steps), lowest, highest)
    return rounded
