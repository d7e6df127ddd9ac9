"""Which blocks an edit of a tensor touches, and what they become. Pure.

A tensor is edited block by block: what is not touched is neither fetched nor sent.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np

from pdbus.canonical import content_digest
from pdbus.messages.common import Digest
from pdbus.weights.blocks import DTYPES, Array, block_count, block_span, byte_view, cut, rows_per_block, shard_of
from pdbus.weights.delta import Form, low_rank, plus_product, sparse
from pdbus.weights.layer import Tensor
from pdbus.weights.manifest import Manifest, layer_block, root_block

Edit: TypeAlias = Callable[[Array], Array]
"""Makes a block's new rows of its old ones, both [rows, …]; the old ones must not be changed."""


@dataclass(frozen=True, slots=True)
class NewBlock:
    """A block of the new version that the old one lacks."""

    tensor: str
    index: int
    digest: Digest
    content: memoryview
    form: Form = "whole"
    base: Digest | None = None
    body: bytes | None = None
    """What travels; None: the content."""

    @property
    def shard(self) -> int:
        return shard_of(self.tensor, self.index)


def replaced(
    name: str, dtype: str, array: Array, old: Tensor | None, before: Array | None = None
) -> tuple[Tensor, list[NewBlock]]:
    """The tensor whose content is now `array`, and its new blocks.

    `before`: what the caller knows the old content to be; blocks that are really so travel as what differs."""
    same = old if old and (old.dtype, old.shape) == (dtype, array.shape) else None
    bases = list(cut(before)) if before is not None and same and before.shape == array.shape else []
    digests: list[Digest] = []
    new: list[NewBlock] = []
    for index, content in enumerate(cut(array)):
        digest = content_digest(content)
        digests.append(digest)
        if same and same.blocks[index] == digest:
            continue
        base = same.blocks[index] if same and bases and content_digest(bases[index]) == same.blocks[index] else None
        body = sparse(bases[index], content, DTYPES[dtype].itemsize) if base else None
        new.append(NewBlock(name, index, digest, content, *(("sparse", base, body) if body else ())))
    return Tensor(name, dtype, array.shape, tuple(digests)), new


def touched_by_rows(tensor: Tensor, rows: Array) -> Mapping[int, Array]:
    """Block index -> positions in `rows` that lie in it."""
    return _grouped(np.asarray(rows) // rows_per_block(tensor.shape, tensor.dtype))


def touched_by_elements(tensor: Tensor, flat: Array) -> Mapping[int, Array]:
    """Block index -> positions in `flat`, element indices, that lie in it."""
    row = int(np.prod(tensor.shape[1:], dtype=np.int64))
    return _grouped(np.asarray(flat) // (row * rows_per_block(tensor.shape, tensor.dtype)))


def row_edits(tensor: Tensor, rows: Array, new: Array) -> tuple[list[NewBlock], dict[int, Edit]]:
    """What it takes that the tensor's `rows`, by index and each once, become `new` [rows, …]: the new blocks of which
    all rows are among them, so that nobody has to know what they were; and of others, block index -> its edit."""

    def edit(index: int, at: Array) -> Edit:
        first, _ = span(tensor, index)

        def put(old: Array) -> Array:
            changed = old.copy()
            changed[rows[at] - first] = new[at]
            return changed

        return put

    blocks: list[NewBlock] = []
    edits: dict[int, Edit] = {}
    for index, at in touched_by_rows(tensor, rows).items():
        if len(at) < span(tensor, index)[1]:
            edits[index] = edit(index, at)
            continue
        content = byte_view(np.ascontiguousarray(new[at[np.argsort(rows[at])]], DTYPES[tensor.dtype]))
        digest = content_digest(content)
        if digest != tensor.blocks[index]:
            blocks.append(NewBlock(tensor.name, index, digest, content))
    return blocks, edits


def element_edits(tensor: Tensor, flat: Array, new: Array) -> dict[int, Edit]:
    """Block index -> its edit, where the elements `flat`, by index into the flattened tensor, become `new`."""
    row = int(np.prod(tensor.shape[1:], dtype=np.int64))

    def edit(index: int, at: Array) -> Edit:
        first = span(tensor, index)[0] * row

        def put(old: Array) -> Array:
            changed = old.copy()
            changed.reshape(-1)[flat[at] - first] = new[at]
            return changed

        return put

    return {index: edit(index, at) for index, at in touched_by_elements(tensor, flat).items()}


def span(tensor: Tensor, index: int) -> tuple[int, int]:
    """(first row, number of rows) of a block."""
    start, size = block_span(tensor.shape, tensor.dtype, index)
    row = max(1, int(np.prod(tensor.shape[1:], dtype=np.int64))) * DTYPES[tensor.dtype].itemsize
    return start // row, size // row


def rows_of(tensor: Tensor, index: int, content: memoryview) -> Array:
    """A block's content as [rows, …] of the tensor."""
    return np.frombuffer(content, DTYPES[tensor.dtype]).reshape(span(tensor, index)[1], *tensor.shape[1:])


def edited(tensor: Tensor, index: int, old: memoryview, edit: Edit) -> NewBlock | None:
    """The block after the edit, as what differs where that is smaller; None where nothing changed.

    `old`: the content of the tensor's block, as it is in `tensor` or after earlier edits."""
    content = byte_view(np.ascontiguousarray(edit(rows_of(tensor, index, old)), DTYPES[tensor.dtype]))
    digest = content_digest(content)
    if digest == tensor.blocks[index]:
        return None
    if content_digest(old) != tensor.blocks[index]:
        return NewBlock(tensor.name, index, digest, content)
    body = sparse(old, content, DTYPES[tensor.dtype].itemsize)
    form: Form = "sparse" if body else "whole"
    return NewBlock(tensor.name, index, digest, content, form, tensor.blocks[index] if body else None, body)


def with_product(tensor: Tensor, index: int, old: memoryview, a: Array, b: Array) -> NewBlock | None:
    """The block after `a @ b` [rows of the tensor, columns] was added to the tensor; travels as factors if smaller."""
    first, rows = span(tensor, index)
    part = a[first : first + rows]
    content = byte_view(plus_product(rows_of(tensor, index, old).reshape(rows, -1), part, b).astype("<f4"))
    digest = content_digest(content)
    if digest == tensor.blocks[index]:
        return None
    body = low_rank(part, b)
    if len(body) >= len(content) or content_digest(old) != tensor.blocks[index]:
        return NewBlock(tensor.name, index, digest, content)
    return NewBlock(tensor.name, index, digest, content, "low_rank", tensor.blocks[index], body)


def with_blocks(tensor: Tensor, new: Mapping[int, Digest]) -> Tensor:
    """The tensor with some of its blocks replaced."""
    blocks = tuple(new.get(index, tensor.blocks[index]) for index in range(block_count(tensor.shape, tensor.dtype)))
    return Tensor(tensor.name, tensor.dtype, tensor.shape, blocks)


def manifest_blocks(manifest: Manifest, parent: Manifest) -> list[NewBlock]:
    """The manifests that the parent lacks; every server holds those."""
    known = {layer.digest for layer in parent.layers}
    root = root_block(manifest.root, len(manifest.encoded))
    blocks = [NewBlock(root.tensor, root.index, root.digest, memoryview(manifest.encoded))]
    for layer in manifest.layers:
        if layer.digest not in known:
            block = layer_block(layer.name, layer.digest, len(layer.encoded))
            blocks.append(NewBlock(block.tensor, block.index, block.digest, memoryview(layer.encoded)))
    return blocks


def _grouped(blocks: Array) -> Mapping[int, Array]:
    """Block -> positions in `blocks` that name it."""
    if not len(blocks):
        return {}
    order = np.argsort(blocks, kind="stable")
    which, starts = np.unique(blocks[order], return_index=True)
    return {int(block): part for block, part in zip(which, np.split(order, starts[1:]), strict=True)}
