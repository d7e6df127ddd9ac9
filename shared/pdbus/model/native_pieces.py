"""Packed native weights as pieces of a shelf, and back."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeAlias

import numpy as np

from pdbus.model.native_llama import NativeLayer
from pdbus.model.shelf import Piece
from pdbus.native.abi import LinearStruct, address
from pdbus.native.pack import PackedLinear

Array: TypeAlias = "np.ndarray[Any, Any]"

_LINEARS = ("qkv", "out", "gate_up", "down")
_NORMS = ("input_norm", "qk_norm", "post_norm")
_ARRAYS = ("weight", "scale", "bias")


def layer_piece(layer: NativeLayer) -> Piece:
    numbers: dict[str, Sequence[int]] = {"window": (layer.window,)}
    arrays = {name: array for name in _NORMS if (array := getattr(layer, name)) is not None}
    for name in _LINEARS:
        piece = linear_piece(getattr(layer, name), name)
        numbers |= piece.numbers
        arrays |= piece.arrays
    return Piece(numbers, arrays)


def layer_of_piece(piece: Piece) -> NativeLayer:
    """It reads the piece's own memory."""
    norms = {name: piece.arrays.get(name) for name in _NORMS}
    linears = {name: linear_of_piece(piece, name) for name in _LINEARS}
    return NativeLayer(**norms, **linears, window=piece.numbers["window"][0])  # type: ignore[arg-type]


def linear_piece(linear: PackedLinear, name: str = "head") -> Piece:
    struct = linear.struct
    named = zip(_ARRAYS, linear.arrays, strict=True)
    arrays = {f"{name}.{part}": array for part, array in named if array is not None}
    return Piece({name: (struct.kind, struct.outputs, struct.inputs)}, arrays)


def linear_of_piece(piece: Piece, name: str = "head") -> PackedLinear:
    kind, outputs, inputs = piece.numbers[name]
    arrays = tuple(piece.arrays.get(f"{name}.{part}") for part in _ARRAYS)
    return PackedLinear(LinearStruct(kind, outputs, inputs, 0, *map(address, arrays)), arrays)


def embedding_piece(rows: Array, *, half: bool) -> Piece:
    return Piece({}, {"rows": np.asarray(rows, np.float16 if half else np.float32)})
