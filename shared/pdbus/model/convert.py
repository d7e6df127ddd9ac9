"""A version in another precision: which tensors it has, and how each is made of those of the version in fp32.

Vectors (norms, biases) and files stay as they are. Matrices become

    fp16, bf16, fp8    all of them
    int8               the linears, as the native engine's int8 quantises them; the embedding fp16, as that engine
                       keeps it. A tied LM head becomes a tensor of its own: it is made from the embedding in fp32

Each row is made by itself, so that a tensor is converted run by run, and equal tensors give equal blocks everywhere.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from pdbus.errors import InvalidRequest
from pdbus.model.encoder_config import EncoderConfig
from pdbus.model.families import AnyConfig
from pdbus.model.parts import EMBEDDING, HEAD
from pdbus.model.quantize import groups8
from pdbus.weights.blocks import GROUP
from pdbus.weights.layer import Tensor, layer_of
from pdbus.weights.packed import Bytes, Floats, Int8Rows, pack_floats

PRECISIONS = ("fp16", "bf16", "int8", "fp8")


@dataclass(frozen=True, slots=True)
class Made:
    """A tensor that has to be made."""

    name: str
    source: Tensor
    """The one in fp32 that it is made of."""
    dtype: str


def plan(
    config: AnyConfig, tensors: Mapping[str, Tensor], precision: str
) -> tuple[tuple[Tensor, ...], tuple[Made, ...]]:
    """(the tensors that stay, those that have to be made) of the version in `precision`.

    Raises InvalidRequest for a version that is not in fp32."""
    stay: list[Tensor] = []
    made: list[Made] = []
    for tensor in tensors.values():
        if tensor.dtype not in ("fp32", "u8"):
            raise InvalidRequest(f"{tensor.name} is in {tensor.dtype}: only versions in fp32 are converted")
        dtype = _dtype(tensor, precision)
        if dtype == tensor.dtype:
            stay.append(tensor)
        else:
            made.append(Made(tensor.name, tensor, dtype))
    tied = not isinstance(config, EncoderConfig) and config.tied_embeddings
    if precision == "int8" and tied and tensors[EMBEDDING].shape[1] % GROUP == 0:
        made.append(Made(HEAD, tensors[EMBEDDING], "int8"))
    return tuple(stay), tuple(made)


def converted(name: str, rows: Floats, dtype: str) -> Bytes:
    """Rows of a tensor in fp32, [rows, …], as packed rows [rows, bytes].

    Raises InvalidRequest where a number is too large for the form."""
    flat = np.ascontiguousarray(rows, np.float32).reshape(len(rows), -1)
    if dtype == "int8":
        return Int8Rows(*groups8(flat)).packed()
    packed = pack_floats(flat, dtype)
    if dtype == "fp16" and not np.isfinite(packed.view("<f2")).all() and np.isfinite(flat).all():
        raise InvalidRequest(f"{name} holds numbers that are too large for fp16: take bf16")
    return packed


def _dtype(tensor: Tensor, precision: str) -> str:
    if tensor.dtype != "fp32" or len(tensor.shape) < 2 or not tensor.nbytes:
        return tensor.dtype
    if precision != "int8":
        return precision
    if layer_of(tensor.name) == "embed":
        return "fp16"
    return "int8" if math.prod(tensor.shape[1:]) % GROUP == 0 else "fp32"
