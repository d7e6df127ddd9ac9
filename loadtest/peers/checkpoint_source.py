"""The only version there is, straight from its checkpoint: what param-servers are to a worker."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

import numpy as np

from pdbus.canonical import content_digest
from pdbus.context import RequestContext
from pdbus.messages.common import Digest
from pdbus.model.checkpoint import Checkpoint
from pdbus.weights.blocks import Run, cut, dtype_name
from pdbus.weights.layer import Tensor, meta_tensor
from pdbus.weights.manifest import Manifest


class CheckpointSource:
    """A WeightSource (pdbus/engine/sources.py)."""

    def __init__(self, checkpoint: Checkpoint) -> None:
        self._checkpoint = checkpoint
        self._last: tuple[str, np.ndarray] | None = None
        files = {meta_tensor(n): np.frombuffer(content, np.uint8) for n, content in checkpoint.meta.items()}
        self.known = Manifest.build(_listed(n, a) for part in (checkpoint.tensors(), files.items()) for n, a in part)

    async def manifest(self, root: Digest, ctx: RequestContext) -> Manifest:
        return self.known

    async def meta(self, root: Digest, ctx: RequestContext) -> Mapping[str, bytes]:
        return self._checkpoint.meta

    async def tensors(
        self,
        root: Digest,
        ctx: RequestContext,
        names: Collection[str] | None = None,
        *,
        rows: slice | None = None,
        progress: object = None,
    ) -> Mapping[str, np.ndarray]:
        if names is None:
            return dict(self._checkpoint.tensors())
        return {name: self._read(name)[rows or slice(None)] for name in names}

    async def runs(
        self, root: Digest, ctx: RequestContext, runs: Sequence[Run], *, progress: object = None
    ) -> Sequence[np.ndarray]:
        return [self._read(run.tensor)[run.rows] for run in runs]

    def _read(self, name: str) -> np.ndarray:
        """The runs of rows of a large tensor are asked for one after another: it is read once for all of them."""
        if self._last is None or self._last[0] != name:
            self._last = None  # before the next one is read
            self._last = (name, self._checkpoint.source.read(name))
        return self._last[1]


def _listed(name: str, array: np.ndarray) -> Tensor:
    return Tensor(name, dtype_name(array.dtype), array.shape, tuple(content_digest(block) for block in cut(array)))
