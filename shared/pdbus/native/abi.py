"""What the compiled library is handed: the structures and kinds of src/abi.h, field by field; addresses of arrays."""

from __future__ import annotations

import ctypes
from ctypes import POINTER, Structure, c_float, c_int32, c_int64, c_void_p
from enum import IntEnum
from typing import Any, TypeAlias

import numpy as np

Array: TypeAlias = "np.ndarray[Any, Any]"

LANES = 16
GROUP = 32


class Kind(IntEnum):
    F32, I8, G4, G8 = range(4)


class KvKind(IntEnum):
    F32, F16, I8 = range(3)


class LinearStruct(Structure):
    _fields_ = (
        ("kind", c_int32),
        ("outputs", c_int32),
        ("inputs", c_int32),
        ("reserved", c_int32),
        ("weight", c_void_p),
        ("scale", c_void_p),
        ("bias", c_void_p),
    )


class LayerStruct(Structure):
    _fields_ = (
        ("input_norm", c_void_p),
        ("qkv", LinearStruct),
        ("qk_norm", c_void_p),
        ("out", LinearStruct),
        ("post_norm", c_void_p),
        ("gate_up", LinearStruct),
        ("down", LinearStruct),
        ("window", c_int32),
        ("reserved", c_int32),
    )


class ModelStruct(Structure):
    _fields_ = (
        ("hidden", c_int32),
        ("inner", c_int32),
        ("heads", c_int32),
        ("kv_heads", c_int32),
        ("head_dim", c_int32),
        ("layer_count", c_int32),
        ("vocabulary", c_int32),
        ("hadamard", c_int32),
        ("epsilon", c_float),
        ("embedding_half", c_int32),
        ("embedding", c_void_p),
        ("frequencies", c_void_p),
        ("final_norm", c_void_p),
        ("head", LinearStruct),
        ("layers", POINTER(LayerStruct)),
    )


class PoolStruct(Structure):
    _fields_ = (
        ("type", c_int32),
        ("pages", c_int32),
        ("page_bytes", c_int64),
        ("layers", POINTER(c_void_p)),
        ("stream_count", c_int32),
        ("reserved", c_int32),
        ("stream_layers", POINTER(c_int32)),
        ("streams", POINTER(c_void_p)),
    )


class BatchStruct(Structure):
    _fields_ = (
        ("tokens", c_int32),
        ("sequences", c_int32),
        ("logit_rows", c_int32),
        ("first_layer", c_int32),
        ("token_ids", c_void_p),
        ("sequence", c_void_p),
        ("page_ids", c_void_p),
        ("logit_row", c_void_p),
    )


class PartStruct(Structure):
    _fields_ = (("model", POINTER(ModelStruct)), ("rows", c_int32), ("logit_rows", c_int32))


OnLayer = ctypes.CFUNCTYPE(c_int32, c_int32)


def address(array: Array | None) -> int | None:
    """Of a C-ordered array's first element; the caller keeps the array alive. None stays None (a null pointer)."""
    if array is None:
        return None
    if not array.flags.c_contiguous:
        raise ValueError("the native engine reads arrays in C order only")
    return int(array.ctypes.data)
