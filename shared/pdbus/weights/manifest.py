"""The manifest of a version, in self-verifying blocks.

The root manifest lists the layers with the digests of their manifests (layer.py), in the order embed, layers.0 …
layers.N, head, meta, table.NAME … (sparse tables by name). Like those it is msgpack in its shortest form, and the
SHA-256 of its bytes is the root: whoever holds a root can check all that follows from it.

    ["pdbus-root-1", [[layer, layer digest], …]]

Files of the checkpoint (config, tokenizer, …) are u8 tensors named `meta/<file>` in the pseudo-layer `meta`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from pdbus import canonical
from pdbus.errors import Corrupt, NotFound
from pdbus.messages.common import Digest
from pdbus.weights.blocks import block_span, shard_of
from pdbus.weights.layer import META, Layer, Tensor, as_digest, layer_of, pack, place, unpack

_KIND = "pdbus-root-1"


@dataclass(frozen=True, slots=True)
class Block:
    """A block by name and by content. `size` in bytes."""

    tensor: str
    index: int
    digest: Digest
    size: int

    @property
    def shard(self) -> int:
        return shard_of(self.tensor, self.index)


@dataclass(frozen=True)
class Manifest:
    """A whole version."""

    layers: tuple[Layer, ...]

    @classmethod
    def build(cls, tensors: Iterable[Tensor]) -> Manifest:
        """The manifest of these tensors, in whatever order they come. Raises ValueError for a name given twice."""
        by_layer: dict[str, dict[str, Tensor]] = {}
        for tensor in tensors:
            if by_layer.setdefault(layer_of(tensor.name), {}).setdefault(tensor.name, tensor) is not tensor:
                raise ValueError(f"the tensor {tensor.name} comes twice")
        layers = (Layer(name, tuple(by_layer[name][t] for t in sorted(by_layer[name]))) for name in by_layer)
        return cls(tuple(sorted(layers, key=lambda layer: place(layer.name))))

    @classmethod
    def assemble(cls, root: bytes, layers: Mapping[Digest, bytes]) -> Manifest:
        """From the bytes of the root manifest and of the layer manifests by digest. Raises Corrupt; the caller has
        checked each digest."""
        listed = root_layers(root)
        return cls.of_layers(listed, {digest: Layer.decode(layers[digest]) for _, digest in listed})

    @classmethod
    def of_layers(cls, listed: Sequence[tuple[str, Digest]], layers: Mapping[Digest, Layer]) -> Manifest:
        """From what `root_layers` gives, and those layers. Raises Corrupt."""
        found = tuple(layers[digest] for _, digest in listed)
        if [layer.name for layer in found] != [name for name, _ in listed]:
            raise Corrupt("a layer manifest stands for another layer than the root says")
        return cls(found)

    @cached_property
    def encoded(self) -> bytes:
        return pack([_KIND, [[layer.name, layer.digest] for layer in self.layers]])

    @cached_property
    def root(self) -> Digest:
        return canonical.content_digest(self.encoded)

    @cached_property
    def tensors(self) -> Mapping[str, Tensor]:
        """By name, in layer order."""
        return {tensor.name: tensor for layer in self.layers for tensor in layer.tensors}

    def tensor(self, name: str) -> Tensor:
        """Raises NotFound."""
        if name not in self.tensors:
            raise NotFound(f"version {self.root.hex()[:12]} has no tensor {name}")
        return self.tensors[name]

    @cached_property
    def files(self) -> tuple[str, ...]:
        """Names of the checkpoint's files in `meta`."""
        return tuple(name.removeprefix(f"{META}/") for name in self.tensors if layer_of(name) == META)

    def blocks(self) -> Iterator[Block]:
        """Every block of the version, the manifests first."""
        yield root_block(self.root, len(self.encoded))
        for layer in self.layers:
            yield layer_block(layer.name, layer.digest, len(layer.encoded))
        for tensor in self.tensors.values():
            yield from tensor_blocks(tensor)

    def manifests(self) -> Iterator[bytes]:
        """The contents of the manifest blocks, in the order of `blocks`."""
        yield self.encoded
        for layer in self.layers:
            yield layer.encoded


def root_layers(content: bytes) -> tuple[tuple[str, Digest], ...]:
    """(layer, digest) of a root manifest. Raises Corrupt."""
    match unpack(content):
        case [str(kind), [*rows]] if kind == _KIND:
            layers = tuple(_named_digest(row) for row in rows)
        case _:
            raise Corrupt("a root manifest can't be read")
    names = [name for name, _ in layers]
    canonical_form = pack([_KIND, [list(layer) for layer in layers]])
    if canonical_form != content or names != sorted(set(names), key=place):
        raise Corrupt("a root manifest is not in canonical form")
    return layers


def root_block(root: Digest, size: int) -> Block:
    return Block("@root", 0, root, size)


def layer_block(layer: str, digest: Digest, size: int) -> Block:
    return Block(f"@layer/{layer}", 0, digest, size)


def tensor_blocks(tensor: Tensor) -> Iterator[Block]:
    for index, digest in enumerate(tensor.blocks):
        yield Block(tensor.name, index, digest, block_span(tensor.shape, tensor.dtype, index)[1])


def _named_digest(row: Any) -> tuple[str, Digest]:
    match row:
        case [str(name), digest]:
            return name, as_digest(digest)
    raise Corrupt("a layer of a root manifest can't be read")
