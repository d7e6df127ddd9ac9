"""A checkpoint becomes blocks in the store, and a manifest: one tensor at a time, never the whole model in memory."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator

import numpy as np

from pdbus.canonical import content_digest
from pdbus.errors import Cancelled
from pdbus.messages.common import Digest
from pdbus.model.checkpoint import Checkpoint
from pdbus.model.families import expected
from pdbus.param_server.holdings import add_manifests
from pdbus.param_server.store import BlockStore
from pdbus.weights.blocks import Array, cut, dtype_name, shard_of, tensor_bytes
from pdbus.weights.layer import Tensor, meta_tensor
from pdbus.weights.manifest import Manifest


class Ingest:
    """One reading of a checkpoint, in a thread of its own. `stop` ends it; `done_bytes` tells how far it is."""

    def __init__(self, checkpoint: Checkpoint, store: BlockStore) -> None:
        self._checkpoint = checkpoint
        self._store = store
        self.stop = threading.Event()
        self.done_bytes = 0
        self.total_bytes = sum(tensor_bytes(s, "fp32") for s in expected(checkpoint.config).values())

    def run(self, keep: Callable[[int, Digest], bool]) -> Manifest:
        """Stores the blocks for which `keep(shard, digest)`, and all manifests. Takes long: call it in a thread.

        Raises CheckpointError, Unavailable where the disk refuses, Cancelled after `stop`."""
        with self._store.writing() as pack:

            def store(tensor: str, index: int, content: memoryview) -> Digest:
                digest = content_digest(content)
                if digest not in self._store and keep(shard_of(tensor, index), digest):
                    pack.add(digest, content)
                return digest

            tensors = []
            for name, array in self._arrays():
                if self.stop.is_set():
                    raise Cancelled("the reading of the checkpoint was stopped")
                blocks = tuple(store(name, index, content) for index, content in enumerate(cut(array)))
                tensors.append(Tensor(name, dtype_name(array.dtype), array.shape, blocks))
                self.done_bytes += array.nbytes
            manifest = Manifest.build(tensors)
            add_manifests(manifest, self._store, pack)
        return manifest

    def _arrays(self) -> Iterator[tuple[str, Array]]:
        for file, content in self._checkpoint.meta.items():
            yield meta_tensor(file), np.frombuffer(content, np.uint8)
        yield from self._checkpoint.tensors()
