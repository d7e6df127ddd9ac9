"""What the pieces of a version are called on a shelf: by what they are made from."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from pdbus.canonical import digest
from pdbus.messages.common import Digest
from pdbus.model.config import ModelConfig
from pdbus.model.parts import EMBEDDING, NORM, Part, Tensors
from pdbus.model.shelf import Shelf
from pdbus.weights.blocks import blocks_of_rows


@dataclass(frozen=True, slots=True)
class PieceKeys:
    """Of a version whose layers have these digests, and whose tensors are these."""

    shelf: Shelf
    config: ModelConfig
    digests: Mapping[str, Digest]
    tensors: Tensors
    """As they are fetched. What is made of a layer is known by its digest, however its tensors come."""
    head_source: str
    """The tensor that the head is made from."""

    @property
    def norm(self) -> Digest:
        """Of the last norm's gains."""
        return self.shelf.key("norm", self.tensors[NORM].digest)

    def layer(self, index: int) -> Digest:
        return self.shelf.key("layer", index, repr(self.config), self.digests[f"layers.{index}"])

    def rows(self, kind: str, part: Part) -> Digest:
        """Of a run of rows of the embedding or the head."""
        (name,) = part.shapes
        tensor = self.tensors[name]
        blocks = blocks_of_rows(tensor.shape, tensor.dtype, part.rows or slice(0, tensor.shape[0]))
        content = digest(b"".join(tensor.blocks[blocks.start : blocks.stop]))
        return self.shelf.key(kind, tensor.dtype, list(tensor.shape[1:]), content)

    def made_of(self, part: Part) -> tuple[str, ...]:
        """The kinds of pieces that a run of rows is needed for."""
        (name,) = part.shapes
        sources = (("embedding", EMBEDDING), ("head", self.head_source))
        return tuple(kind for kind, source in sources if source == name)
