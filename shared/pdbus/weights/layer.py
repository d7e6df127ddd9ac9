"""One layer of a version: its tensors, their block digests, and the manifest that lists them.

    ["pdbus-layer-1", layer, [[tensor, dtype, [dim, …], [digest, …]], …]]                      tensors by name

The manifest is msgpack in its shortest form; the SHA-256 of those very bytes is the layer's digest.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import msgpack

from pdbus import canonical
from pdbus.errors import Corrupt
from pdbus.messages.common import Digest
from pdbus.weights.blocks import block_count, is_dtype, tensor_bytes

META = "meta"
TABLE = "table."
"""How the layers of sparse tables begin (tables.py)."""
_KIND = "pdbus-layer-1"
# Few digits, and those of ASCII: a number that can't be read, or read in two ways, is not a layer's
_NAME = re.compile(r"(embed)|layers\.(0|[1-9][0-9]{0,5})|(head)|(meta)|(table\.[A-Za-z0-9_-]+)")
_NUMBERED = re.compile(r"(?:^|\.)layers?\.([0-9]{1,6})\.")


def meta_tensor(file: str) -> str:
    """The tensor name of a checkpoint's file."""
    return f"{META}/{file}"


def layer_of(tensor: str) -> str:
    """The layer of a tensor, by its checkpoint name: `layers.N` from `….layers.N.…`, else embed, head or meta; each
    sparse table is one of its own."""
    if tensor.startswith(f"{META}/"):
        return META
    if tensor.startswith(TABLE):
        return tensor.partition("/")[0]
    if numbered := _NUMBERED.search(tensor):
        return f"layers.{int(numbered[1])}"
    return "embed" if "embed" in tensor else "head"


def is_computed(layer: str) -> bool:
    """Whether workers compute with a layer: neither with the checkpoint's files nor with sparse tables."""
    return layer != META and not layer.startswith(TABLE)


@dataclass(frozen=True, slots=True)
class Tensor:
    name: str
    dtype: str
    """A name of blocks.DTYPES or PACKED_ROW_BYTES."""
    shape: tuple[int, ...]
    blocks: tuple[Digest, ...]

    @property
    def digest(self) -> Digest:
        """Identity of dtype, shape and content, whatever its name."""
        return canonical.digest([self.dtype, self.shape, b"".join(self.blocks)])

    @property
    def nbytes(self) -> int:
        return tensor_bytes(self.shape, self.dtype)


@dataclass(frozen=True)
class Layer:
    name: str
    tensors: tuple[Tensor, ...]
    """By name."""

    @cached_property
    def encoded(self) -> bytes:
        """The layer manifest; its content digest is the layer's digest."""
        tensors = [[t.name, t.dtype, list(t.shape), list(t.blocks)] for t in self.tensors]
        return pack([_KIND, self.name, tensors])

    @cached_property
    def digest(self) -> Digest:
        return canonical.content_digest(self.encoded)

    @classmethod
    def decode(cls, content: bytes) -> Layer:
        """Raises Corrupt where `content` is not the one canonical form of a layer."""
        match unpack(content):
            case [str(kind), str(name), [*rows]] if kind == _KIND:
                layer = cls(name, tuple(_tensor(row) for row in rows))
            case _:
                raise Corrupt("a layer manifest can't be read")
        names = [tensor.name for tensor in layer.tensors]
        if layer.encoded != content or names != sorted(set(names)) or any(layer_of(t) != name for t in names):
            raise Corrupt(f"the manifest of layer {name} is not in canonical form")
        return layer


def place(layer: str) -> tuple[int, int, str]:
    """By which the layers of a version are in order."""
    match = _NAME.fullmatch(layer)
    if not match:
        raise Corrupt(f"{layer!r} is not a layer's name")
    return match.lastindex or 0, int(match[2] or 0), layer


def as_digest(value: Any) -> Digest:
    if isinstance(value, bytes) and len(value) == canonical.DIGEST_BYTES:
        return value
    raise Corrupt("a manifest holds something that is not a digest")


def pack(value: list[Any]) -> bytes:
    packed: bytes = msgpack.packb(value, use_bin_type=True)
    return packed


def unpack(content: bytes) -> Any:
    try:
        return msgpack.unpackb(content, raw=False)
    except (ValueError, msgpack.UnpackException):  # UnicodeDecodeError is a ValueError
        raise Corrupt("a manifest is not msgpack") from None


def _tensor(row: Any) -> Tensor:
    match row:
        case [str(name), str(dtype), [*shape], [*blocks]] if all(map(_is_dim, shape)) and is_dtype(dtype, shape):
            tensor = Tensor(name, dtype, tuple(shape), tuple(map(as_digest, blocks)))
            if len(tensor.blocks) == block_count(tensor.shape, dtype):
                return tensor
    raise Corrupt("a tensor of a layer manifest can't be read")


def _is_dim(value: Any) -> bool:
    return type(value) is int and 0 <= value < 2**40
