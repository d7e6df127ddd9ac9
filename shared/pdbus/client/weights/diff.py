"""How two versions differ. Pure."""

from __future__ import annotations

from dataclasses import dataclass

from pdbus.weights.manifest import Manifest


@dataclass(frozen=True, slots=True)
class TensorDiff:
    """How a tensor differs between two versions."""

    name: str
    blocks: tuple[int, ...]
    """Indices of the blocks that differ; all of them where its shape or type does, or one side lacks it."""
    of: int
    """Blocks that it has."""
    bytes: int
    """Of the blocks that differ."""


def tensor_diffs(old: Manifest, new: Manifest) -> tuple[TensorDiff, ...]:
    """The tensors that differ, in the order of layers."""
    before, after = old.tensors, new.tensors
    found: list[TensorDiff] = []
    for name in dict.fromkeys((*after, *before)):
        one, other = before.get(name), after.get(name)
        shown = other or one
        assert shown
        if one == other:
            continue
        alike = one and other and (one.dtype, one.shape) == (other.dtype, other.shape)
        pairs = zip(one.blocks, other.blocks, strict=True) if one and other and alike else None
        blocks = tuple(i for i, (a, b) in enumerate(pairs) if a != b) if pairs else tuple(range(len(shown.blocks)))
        size = round(shown.nbytes * len(blocks) / max(len(shown.blocks), 1))
        found.append(TensorDiff(name, blocks, len(shown.blocks), size))
    return tuple(found)
