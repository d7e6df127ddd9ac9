"""The GGUF container: metadata and tensor directory, read without trusting a single length in it.

The `gguf` package's own reader follows the lengths that the file claims (a false one keeps it busy for ever) and makes
an array per vocabulary entry; so only its tables of number formats and its dequantisation are used.
Format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md
"""

from __future__ import annotations

import mmap
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType
from gguf.quants import dequantize

from pdbus.model.refusal import CheckpointError, UnsupportedModel
from pdbus.model.source import Tensor

Value: TypeAlias = "int | float | bool | str | list[str] | np.ndarray[Any, Any]"

# Far above any real file; together they bound the memory that a false header can cost to some hundred megabytes
MAX_ENTRIES = 1 << 16
MAX_STRINGS = 1 << 21
MAX_STRING_BYTES = 4 << 20
MAX_HEADER_BYTES = 256 << 20

_BYTES_AT_ONCE = 1 << 20

_SCALARS = {0: "<B", 1: "<b", 2: "<H", 3: "<h", 4: "<I", 5: "<i", 6: "<f", 7: "<?", 10: "<Q", 11: "<q", 12: "<d"}
_STRING, _ARRAY, _FLOAT32 = 8, 9, 6


@dataclass(frozen=True, slots=True)
class GgufTensor:
    """Where one tensor's bytes lie, and how they are to be read."""

    path: Path
    format: Any  # GGMLQuantizationType
    shape: tuple[int, ...]
    """[rows, …, columns]: the reverse of GGUF's own order, which names the columns first."""
    offset: int
    row_bytes: int

    @property
    def bytes(self) -> int:
        return prod(self.shape[:-1]) * self.row_bytes

    def read(self) -> Tensor:
        """The tensor, dequantised to float32."""
        shape = (prod(self.shape[:-1]), self.row_bytes)
        try:
            raw = np.memmap(self.path, dtype=np.uint8, mode="r", offset=self.offset, shape=shape)
        except (OSError, ValueError) as error:
            raise CheckpointError.of(self.path, f"can't be read any more: {error}") from error
        values: Tensor = np.empty((len(raw), self.shape[-1]), np.float32)
        # Dequantising takes several times its result; rows are apart, so that a few at a time give the same.
        step = max(1, _BYTES_AT_ONCE // self.row_bytes)
        for start in range(0, len(raw), step):
            values[start : start + step] = dequantize(np.array(raw[start : start + step], subok=False), self.format)
        return values.reshape(self.shape)


@dataclass(frozen=True, slots=True)
class GgufFile:
    path: Path
    metadata: Mapping[str, Value]
    tensors: Mapping[str, GgufTensor]


def read_header(path: Path) -> GgufFile:
    """Reads all but the weights. Raises CheckpointError if any of it does not fit into the file."""
    try:
        with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            return _Header(path, data).read()
    except (OSError, ValueError) as error:
        raise CheckpointError.of(path, f"can't be read: {error}") from error


class _Header:
    """A cursor over the file; every step checks that what it is about to take is there."""

    def __init__(self, path: Path, data: mmap.mmap) -> None:
        self._path = path
        self._data = data
        self._at = 0
        self._strings = 0

    def read(self) -> GgufFile:
        if self._take(4) != b"GGUF":
            raise self._wrong("it does not begin with GGUF")
        version = self._scalar("<I")
        if version not in (2, 3):
            kind = "of a big-endian machine" if version % (1 << 16) == 0 else f"of version {version}"
            raise self._wrong(f"a GGUF file {kind}; versions 2 and 3, little-endian, are read")
        tensors, entries = self._scalar("<Q"), self._scalar("<Q")
        if max(tensors, entries) > MAX_ENTRIES:
            raise self._wrong(f"claims {tensors} tensors and {entries} metadata entries")
        metadata: dict[str, Value] = {}
        for _ in range(entries):
            key = self._string()
            if key in metadata:
                raise self._wrong(f"metadata {key:.80} is there twice")
            metadata[key] = self._value(key, self._scalar("<I"))
        return GgufFile(self._path, metadata, self._directory(tensors, metadata.get("general.alignment", 32)))

    def _value(self, key: str, kind: int) -> Value:
        if kind == _STRING:
            return self._string()
        if kind in _SCALARS:
            value = self._scalar(_SCALARS[kind])
            # The shortest decimal that means the same float32: 1e-05, not 9.999999747378752e-06
            return float(str(np.float32(value))) if kind == _FLOAT32 else value
        if kind != _ARRAY:
            raise self._wrong(f"metadata {key:.80} is of unknown type {kind}")
        item, count = self._scalar("<I"), self._scalar("<Q")
        if item == _STRING:
            return [self._string() for _ in range(self._bounded(count, 8))]
        if item not in _SCALARS:
            raise self._wrong(f"metadata {key:.80} is an array of type {item}")
        dtype = np.dtype(_SCALARS[item])
        return np.frombuffer(self._take(count * dtype.itemsize), dtype)

    def _directory(self, count: int, alignment: Value) -> dict[str, GgufTensor]:
        if not isinstance(alignment, int) or alignment < 1 or alignment & (alignment - 1) or alignment > 1 << 20:
            raise self._wrong("general.alignment must be a power of two")
        found: dict[str, GgufTensor] = {}
        for _ in range(count):
            name = self._string()
            if name in found:
                raise self._wrong(f"tensor {name:.80} is there twice")
            found[name] = self._tensor(name)
        start = -(-self._at // alignment) * alignment
        end = start
        for name, tensor in sorted(found.items(), key=lambda pair: pair[1].offset):
            first = start + tensor.offset
            if first < end or first % alignment or first + tensor.bytes > len(self._data):
                raise self._wrong(f"tensor {name:.80} does not lie inside the file, aligned and by itself; truncated?")
            end = first + tensor.bytes
            found[name] = GgufTensor(self._path, tensor.format, tensor.shape, first, tensor.row_bytes)
        return found

    def _tensor(self, name: str) -> GgufTensor:
        """A directory entry, its offset still relative to the start of the data."""
        dimensions = self._scalar("<I")
        if not 1 <= dimensions <= 4:
            raise self._wrong(f"tensor {name:.80} claims {dimensions} dimensions")
        shape = tuple(self._scalar("<Q") for _ in range(dimensions))[::-1]
        if min(shape) < 1 or prod(shape) > 8 * len(self._data):
            raise self._wrong(f"tensor {name:.80} claims shape {shape}, more than the file holds; truncated?")
        number, offset = self._scalar("<I"), self._scalar("<Q")
        try:
            kind = GGMLQuantizationType(number)
            block, block_bytes = GGML_QUANT_SIZES[kind]
            dequantize(np.zeros((1, block_bytes), np.uint8), kind)
        except (ValueError, KeyError, NotImplementedError) as error:
            raise UnsupportedModel(f"{self._path}: tensor {name:.80} is in number format {number}: {error}") from error
        if shape[-1] % block:
            raise self._wrong(
                f"tensor {name:.80} has rows of {shape[-1]}, which {kind.name} blocks of {block} don't fill"
            )
        return GgufTensor(self._path, kind, shape, offset, shape[-1] // block * block_bytes)

    def _string(self) -> str:
        self._strings += 1
        size = self._scalar("<Q")
        if size > MAX_STRING_BYTES or self._strings > MAX_STRINGS:
            raise self._wrong(f"claims a text of {size} bytes, after {self._strings} texts")
        try:
            return self._take(size).decode()
        except UnicodeDecodeError as error:
            raise self._wrong(f"a text in its header is not UTF-8: {error.reason}") from error

    def _bounded(self, count: int, item_bytes: int) -> int:
        if count * item_bytes > len(self._data) - self._at:
            raise self._wrong(f"claims {count} items where the file has but {len(self._data) - self._at} bytes left")
        return count

    def _scalar(self, format: str) -> Any:
        return struct.unpack(format, self._take(struct.calcsize(format)))[0]

    def _take(self, size: int) -> bytes:
        end = self._at + size
        if end > min(len(self._data), MAX_HEADER_BYTES):
            raise self._wrong(f"its header ends at byte {self._at}, but {size} more are claimed; truncated?")
        taken = self._data[self._at : end]
        self._at = end
        return taken

    def _wrong(self, reason: str) -> CheckpointError:
        return CheckpointError.of(self._path, f"not a valid GGUF file: {reason}")
