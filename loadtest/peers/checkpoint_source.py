"""The only version there is, straight from its checkpoint: what param-servers are to a worker."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping

import numpy as np

from pdbus.canonical import content_digest
from pdbus.context import RequestContext
from pdbus.messages.common import Digest
from pdbus.model.checkpoint import Checkpoint
from pdbus.weights.blocks import cut, dtype_name
from pdbus.weights.layer import Tensor, meta_tensor
from pdbus.weights.manifest import Manifest


class CheckpointSource:
    """A WeightSource (pdbus/engine/version.py)."""

    def __init__(self, checkpoint: Checkpoint) -> None:
        self._checkpoint = checkpoint
        files = {meta_tensor(n): np.frombuffer(content, np.uint8) for n, content in checkpoint.meta.items()}
        self.known = Manifest.build(_listed(n, a) for part in (checkpoint.tensors(), files.items()) for n, a in part)

    async def manifest(self, root: Digest, ctx: RequestContext) -> Manifest:
        return self.known

    async def meta(self, root: Digest, ctx: RequestContext) -> Mapping[str, bytes]:
        return self._checkpoint.meta

    async def tensors(
        self, root: Digest, ctx: RequestContext, names: Collection[str] | None = None, *, progress: object = None
    ) -> Mapping[str, np.ndarray]:
        return _Lazy(self._checkpoint)


class _Lazy(Mapping[str, np.ndarray]):
    """Reads a tensor when it is asked for."""

    def __init__(self, checkpoint: Checkpoint) -> None:
        self._source = checkpoint.source

    def __getitem__(self, name: str) -> np.ndarray:
        return self._source.read(name)

    def __iter__(self) -> Iterator[str]:
        return iter(self._source.shapes)

    def __len__(self) -> int:
        return len(self._source.shapes)


def _listed(name: str, array: np.ndarray) -> Tensor:
    return Tensor(name, dtype_name(array.dtype), array.shape, tuple(content_digest(block) for block in cut(array)))
