"""One update: staged, prepared, committed, or aborted as a whole (DESIGN.md section 4). This process coordinates it.

Nothing of it is visible before its commit is in the change log (commit_point.py).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from types import TracebackType
from typing import Any, Self

import numpy as np

from pdbus.bus.bus import Bus
from pdbus.client.weights.arrays import as_factors, as_fp32, as_ids
from pdbus.client.weights.commit_point import append_abort, append_commit
from pdbus.client.weights.edits import (
    Edit,
    NewBlock,
    edited,
    element_edits,
    manifest_blocks,
    replaced,
    row_edits,
    with_blocks,
    with_product,
)
from pdbus.client.weights.stager import Stager
from pdbus.client.weights.terms import Committed, Terms
from pdbus.context import Deadline, RequestContext
from pdbus.errors import Conflict, InvalidRequest, PdbusError
from pdbus.messages.changelog import NOTHING_CHANGED, Commit
from pdbus.messages.common import Digest
from pdbus.peers.history import HistoryFollower
from pdbus.peers.weights import BlockReader
from pdbus.weights.blocks import Array, block_count
from pdbus.weights.layer import META, Tensor, is_computed, layer_of, meta_tensor
from pdbus.weights.manifest import Manifest


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
        self._whole_layers: set[str] = set()
        """Layers that consist of tensors in `_tensors` only."""
        self._ended = False
        """The log is known to have the transaction's end."""

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
        if not self._ended:
            reason = str(error) or type(error).__name__ if error else "left without a commit"
            code = error.code if isinstance(error, PdbusError) else Conflict.code
            await self._abort(reason, code)

    async def _abort(self, reason: str, code: str) -> None:
        await append_abort(self._bus, self._model, self._terms.tx, reason, code)

    async def stage(self, name: str, value: Any, *, before: Any = None) -> int:
        """The whole tensor, whose memory must stay as it is until the commit. Returns how many of its blocks are new.

        `before`: its content as far as the caller knows; where that is right, only what differs travels.
        Raises InvalidRequest for another shape than the tensor has, or values that are not finite; NotFound."""
        tensor, array = self.tensor(name), as_fp32(name, value)
        if array.shape != tensor.shape:
            raise InvalidRequest(f"{name} has shape {tensor.shape}, not {array.shape}", param=name)
        known = None if before is None else as_fp32(name, before)
        new, blocks = replaced(name, tensor.dtype, array, tensor, known)
        return await self._take(new, blocks)

    async def stage_file(self, file: str, content: bytes) -> int:
        """A file of the checkpoint, such as tokenizer.json. It may be new."""
        name = meta_tensor(file)
        new, blocks = replaced(name, "u8", np.frombuffer(content, np.uint8), self.tensors.get(name))
        return await self._take(new, blocks)

    async def stage_rows(self, name: str, rows: Any, values: Any) -> int:
        """Rows of a tensor, by index, each once. Raises as `stage`."""
        tensor = self.tensor(name)
        ids = as_ids(name, rows, tensor.shape[0] if tensor.shape else 1)
        new = as_fp32(name, values)
        if new.shape != (len(ids), *tensor.shape[1:]):
            raise InvalidRequest(f"{len(ids)} rows of {name} have shape {(len(ids), *tensor.shape[1:])}", param=name)
        blocks, edits = row_edits(tensor, ids, new)
        return await self._edit(tensor, edits, blocks)

    async def stage_elements(self, name: str, flat: Any, values: Any) -> int:
        """Single elements, by index into the flattened tensor, each once. Raises as `stage`."""
        tensor = self.tensor(name)
        ids, new = as_ids(name, flat, int(np.prod(tensor.shape, dtype=np.int64))), as_fp32(name, values)
        if new.shape != ids.shape:
            raise InvalidRequest(f"{len(ids)} elements of {name} take as many values, not {new.shape}", param=name)
        return await self._edit(tensor, element_edits(tensor, ids, new))

    async def stage_low_rank(self, name: str, a: Any, b: Any) -> int:
        """Adds `a @ b` to a matrix: a [rows, rank], b [rank, columns]. Raises as `stage`."""
        tensor = self.tensor(name)
        left, right = as_factors(name, a, b, tensor.shape)
        indices = range(block_count(tensor.shape, tensor.dtype))
        old = await self._blocks(tensor, indices)
        blocks = [with_product(tensor, index, old[index], left, right) for index in indices]
        return await self._put(tensor, [block for block in blocks if block])

    async def send_for_good(self, blocks: Sequence[NewBlock], *, everywhere: bool = False) -> None:
        """Blocks of a tensor that `put_layer` is going to name; on return they are durable, and not kept here."""
        await self._stager.send(blocks, everywhere=everywhere)
        await self._stager.let_go()

    def put_layer(self, layer: str, tensors: Iterable[Tensor]) -> None:
        """The layer consists of exactly these; what of their blocks is new has been sent."""
        self._tensors = {name: old for name, old in self._tensors.items() if layer_of(name) != layer}
        self._tensors |= {tensor.name: tensor for tensor in tensors}
        self._whole_layers.add(layer)

    async def block_arrays(self, name: str, indices: Sequence[int]) -> dict[int, Array]:
        """Blocks of a tensor by index as they are now: copies, flat, to be changed at will. Raises as `stage`."""
        found = await self._blocks(self.tensor(name), indices)
        return {index: np.frombuffer(content, "<f4").copy() for index, content in found.items()}

    async def stage_blocks(self, name: str, blocks: Mapping[int, Array]) -> int:
        """Blocks of a tensor by index, flat. Raises InvalidRequest for values that are not finite."""
        for array in blocks.values():
            as_fp32(name, array)

        def edit(array: Array) -> Edit:
            return lambda old: array.reshape(old.shape)

        return await self._edit(self.tensor(name), {index: edit(array) for index, array in blocks.items()})

    async def commit(self) -> Committed:
        """Makes the version exist. Raises Conflict, naming the winner, where the line went on meanwhile;
        DeadlineExceeded and Unavailable where it could not be made durable: nothing is visible of it then."""
        return await self._commit(self.tensors)

    async def _commit(self, tensors: Mapping[str, Tensor]) -> Committed:
        manifest = Manifest.build(tensors.values())
        if manifest.root == self.parent and not self._terms.sealed:
            await self._abort("nothing differs from the parent", NOTHING_CHANGED)
            return self._done(self.parent, self._follower.history.roots[self.parent].at.seq)
        await self._stager.send(manifest_blocks(manifest, self._manifest), everywhere=True)
        await self._stager.settle()
        known = {layer.name: layer.digest for layer in self._manifest.layers}
        layers = tuple((one.name, one.digest) for one in manifest.layers if known.get(one.name) != one.digest)
        at = self._terms
        commit = Commit(at.tx, manifest.root, self.parent, at.author, at.message, layers, "fp32", at.ref, at.sealed)
        seq = await append_commit(self._bus, self._model, self._follower, commit, self._deadline)
        return self._done(manifest.root, seq)

    def _done(self, root: Digest, seq: int) -> Committed:
        self._ended = True
        old = self._manifest.tensors
        changed = (
            len(set(new.blocks) - set(old[name].blocks if name in old else ())) for name, new in self._tensors.items()
        )
        return Committed(root, seq, sum(changed), self._stager.sent_bytes)

    @property
    def tensors(self) -> Mapping[str, Tensor]:
        """Of the version to be, as it is now."""
        kept = {name: old for name, old in self._manifest.tensors.items() if layer_of(name) not in self._whole_layers}
        return {**kept, **self._tensors}

    def tensor(self, name: str) -> Tensor:
        """As it is now. Raises NotFound, InvalidRequest for a file and for a sparse table."""
        if not is_computed(layer := layer_of(name)):
            way = "stage_file takes it" if layer == META else "rows of tables are updated by `table(name).update`"
            raise InvalidRequest(f"{name} is no tensor of the model: {way}", param=name)
        return self._tensors.get(name) or self._manifest.tensor(name)

    async def _edit(self, tensor: Tensor, edits: Mapping[int, Edit], more: Sequence[NewBlock] = ()) -> int:
        """`more`: further new blocks, which need not be made of old ones."""
        old = await self._blocks(tensor, list(edits))
        blocks = [edited(tensor, index, old[index], edit) for index, edit in edits.items()]
        return await self._put(tensor, [*more, *(block for block in blocks if block)])

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
