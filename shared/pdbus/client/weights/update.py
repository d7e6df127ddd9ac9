"""One update: staged, prepared, committed, or aborted as a whole (DESIGN.md section 4). This process coordinates it.

Nothing of it is visible before its commit is in the change log (commit_point.py).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Self

import numpy as np

from pdbus.bus.bus import Bus
from pdbus.client.weights.arrays import as_fp32, as_ids
from pdbus.client.weights.commit_point import append_abort, append_commit
from pdbus.client.weights.edits import (
    Edit,
    NewBlock,
    edited,
    replaced,
    span,
    touched_by_elements,
    touched_by_rows,
    with_blocks,
    with_product,
)
from pdbus.client.weights.stager import Stager
from pdbus.context import Deadline, RequestContext
from pdbus.errors import InvalidRequest
from pdbus.messages.changelog import Commit
from pdbus.messages.common import Digest
from pdbus.peers.history import HistoryFollower
from pdbus.peers.weights import BlockReader
from pdbus.weights.blocks import Array, block_count
from pdbus.weights.layer import META, Tensor, layer_of, meta_tensor
from pdbus.weights.manifest import Manifest, layer_block, root_block


@dataclass(frozen=True, slots=True)
class Committed:
    """A version that exists."""

    root: Digest
    seq: int
    """Of its commit in the change log."""
    changed_blocks: int
    sent_bytes: int
    """Of blocks, as they travelled to all their owners."""


@dataclass(frozen=True, slots=True)
class Terms:
    """What an update says of itself."""

    tx: str
    ref: str
    message: str
    author: str
    parent: Digest | None = None
    """None: the head of the line."""


class Update:
    """Made by `Weights.begin`. Entered, it stages; left without `commit`, or by an error before it, it is aborted."""

    def __init__(
        self,
        bus: Bus,
        model: str,
        follower: HistoryFollower,
        reader: BlockReader,
        stager: Stager,
        terms: Terms,
        deadline: Deadline,
    ) -> None:
        self._bus, self._model, self._follower, self._reader = bus, model, follower, reader
        self._stager, self._terms, self._deadline = stager, terms, deadline
        self._tensors: dict[str, Tensor] = {}
        """Those that were changed."""
        self._contents: dict[Digest, memoryview] = {}
        self._committed = False

    async def __aenter__(self) -> Self:
        """Raises NotFound where the line has no version to go on from, InvalidRequest where that was converted."""
        history = self._follower.history
        parent = self._terms.parent or history.head(self._terms.ref) or history.resolve(self._terms.ref or "stable")
        self.parent = parent
        self._manifest = await self._reader.manifest(parent, self._ctx())
        if found := history.conversions.sources.get(parent):
            source, precision = found
            raise InvalidRequest(
                f"version {parent.hex()[:12]} is {precision} of {source.hex()[:12]}: update that, and it is made again"
            )
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if not self._committed:
            reason = str(error) or type(error).__name__ if error else "left without a commit"
            await append_abort(self._bus, self._model, self._terms.tx, reason)

    async def stage(self, name: str, value: Any, *, before: Any = None) -> int:
        """The whole tensor. Returns how many of its blocks are new.

        `before`: its content as far as the caller knows; where that is right, only what differs travels.
        Raises InvalidRequest for another shape than the tensor has, or values that are not finite; NotFound."""
        tensor, array = self._tensor(name), as_fp32(name, value)
        if array.shape != tensor.shape:
            raise InvalidRequest(f"{name} has shape {tensor.shape}, not {array.shape}", param=name)
        known = None if before is None else as_fp32(name, before)
        new, blocks = replaced(name, tensor.dtype, array, tensor, known)
        return await self._take(new, blocks)

    async def stage_file(self, file: str, content: bytes) -> int:
        """A file of the checkpoint, such as tokenizer.json. It may be new."""
        name = meta_tensor(file)
        new, blocks = replaced(name, "u8", np.frombuffer(content, np.uint8), self._current.get(name))
        return await self._take(new, blocks)

    async def stage_rows(self, name: str, rows: Any, values: Any) -> int:
        """Rows of a tensor, by index, each once. Raises as `stage`."""
        tensor = self._tensor(name)
        ids = as_ids(name, rows, tensor.shape[0] if tensor.shape else 1)
        new = as_fp32(name, values)
        if new.shape != (len(ids), *tensor.shape[1:]):
            raise InvalidRequest(f"{len(ids)} rows of {name} have shape {(len(ids), *tensor.shape[1:])}", param=name)

        def edit(index: int, at: Array) -> Edit:
            first, _ = span(tensor, index)

            def put(old: Array) -> Array:
                changed = old.copy()
                changed[ids[at] - first] = new[at]
                return changed

            return put

        touched = touched_by_rows(tensor, ids)
        return await self._edit(tensor, {index: edit(index, at) for index, at in touched.items()})

    async def stage_elements(self, name: str, flat: Any, values: Any) -> int:
        """Single elements, by index into the flattened tensor, each once. Raises as `stage`."""
        tensor = self._tensor(name)
        ids, new = as_ids(name, flat, int(np.prod(tensor.shape, dtype=np.int64))), as_fp32(name, values)
        if new.shape != ids.shape:
            raise InvalidRequest(f"{len(ids)} elements of {name} take as many values, not {new.shape}", param=name)
        row = int(np.prod(tensor.shape[1:], dtype=np.int64))

        def edit(index: int, at: Array) -> Edit:
            first = span(tensor, index)[0] * row

            def put(old: Array) -> Array:
                changed = old.copy()
                changed.reshape(-1)[ids[at] - first] = new[at]
                return changed

            return put

        touched = touched_by_elements(tensor, ids)
        return await self._edit(tensor, {index: edit(index, at) for index, at in touched.items()})

    async def stage_low_rank(self, name: str, a: Any, b: Any) -> int:
        """Adds `a @ b` to a matrix: a [rows, rank], b [rank, columns]. Raises as `stage`."""
        tensor = self._tensor(name)
        left, right = as_fp32(name, a), as_fp32(name, b)
        if (
            left.ndim != 2
            or right.ndim != 2
            or (left.shape[0], right.shape[1]) != tensor.shape
            or left.shape[1] != right.shape[0]
        ):
            raise InvalidRequest(f"{left.shape} @ {right.shape} does not fit {name}, {tensor.shape}", param=name)
        indices = range(block_count(tensor.shape, tensor.dtype))
        old = await self._blocks(tensor, indices)
        blocks = [with_product(tensor, index, old[index], left, right) for index in indices]
        return await self._put(tensor, [block for block in blocks if block])

    async def commit(self) -> Committed:
        """Makes the version exist. Raises Conflict, naming the winner, where the line went on meanwhile;
        DeadlineExceeded and Unavailable where it could not be made durable: nothing is visible of it then."""
        manifest = Manifest.build({**self._manifest.tensors, **self._tensors}.values())
        changed = sum(
            len(set(new.blocks) - set(self._manifest.tensors[name].blocks if name in self._manifest.tensors else ()))
            for name, new in self._tensors.items()
        )
        if manifest.root == self.parent:
            self._committed = True
            return Committed(self.parent, self._follower.history.roots[self.parent].at.seq, 0, 0)
        await self._stager.send(_manifest_blocks(manifest, self._manifest), everywhere=True)
        await self._stager.settle()
        known = {layer.name: layer.digest for layer in self._manifest.layers}
        layers = tuple((one.name, one.digest) for one in manifest.layers if known.get(one.name) != one.digest)
        terms = self._terms
        commit = Commit(terms.tx, manifest.root, self.parent, terms.author, terms.message, layers, "fp32", terms.ref)
        seq = await append_commit(self._bus, self._model, self._follower, commit, self._deadline)
        self._committed = True
        return Committed(manifest.root, seq, changed, self._stager.sent_bytes)

    @property
    def _current(self) -> Mapping[str, Tensor]:
        return {**self._manifest.tensors, **self._tensors}

    def _tensor(self, name: str) -> Tensor:
        if layer_of(name) == META:
            raise InvalidRequest(f"{name} is a file: stage_file takes it", param=name)
        return self._tensors.get(name) or self._manifest.tensor(name)

    async def _edit(self, tensor: Tensor, edits: Mapping[int, Edit]) -> int:
        old = await self._blocks(tensor, list(edits))
        blocks = [edited(tensor, index, old[index], edit) for index, edit in edits.items()]
        return await self._put(tensor, [block for block in blocks if block])

    async def _blocks(self, tensor: Tensor, indices: Sequence[int] | range) -> dict[int, memoryview]:
        """Contents as they are now: staged here before, or the parent's."""
        lacking = [index for index in indices if tensor.blocks[index] not in self._contents]
        found = await self._reader.blocks(tensor, lacking, self._ctx())
        return {index: self._contents.get(tensor.blocks[index]) or found[index] for index in indices}

    async def _put(self, tensor: Tensor, blocks: Sequence[NewBlock]) -> int:
        return await self._take(with_blocks(tensor, {block.index: block.digest for block in blocks}), blocks)

    async def _take(self, tensor: Tensor, blocks: Sequence[NewBlock]) -> int:
        if blocks:
            await self._stager.send(blocks)
            self._contents |= {block.digest: block.content for block in blocks}
        self._tensors[tensor.name] = tensor
        return len(blocks)

    def _ctx(self) -> RequestContext:
        return RequestContext(self._deadline)


def _manifest_blocks(manifest: Manifest, parent: Manifest) -> list[NewBlock]:
    """The manifests that the parent lacks; every server holds those."""
    known = {layer.digest for layer in parent.layers}
    root = root_block(manifest.root, len(manifest.encoded))
    blocks = [NewBlock(root.tensor, root.index, root.digest, memoryview(manifest.encoded))]
    for layer in manifest.layers:
        if layer.digest not in known:
            block = layer_block(layer.name, layer.digest, len(layer.encoded))
            blocks.append(NewBlock(block.tensor, block.index, block.digest, memoryview(layer.encoded)))
    return blocks
