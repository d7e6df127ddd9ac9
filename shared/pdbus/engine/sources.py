"""Where the weights of a worker come from, as far as loading needs it."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from typing import Any, Protocol, TypeAlias

import numpy as np

from pdbus.context import RequestContext
from pdbus.messages.common import Digest
from pdbus.weights.blocks import Run
from pdbus.weights.manifest import Manifest

Progress: TypeAlias = Callable[[int, int], None]
"""(bytes so far, bytes in all)."""


class WeightSource(Protocol):
    """Where versions come from: peers/weights.py over the bus."""

    async def manifest(self, root: Digest, ctx: RequestContext) -> Manifest: ...

    async def meta(self, root: Digest, ctx: RequestContext) -> Mapping[str, bytes]: ...

    async def tensors(
        self,
        root: Digest,
        ctx: RequestContext,
        names: Collection[str] | None = None,
        *,
        rows: slice | None = None,
        progress: Progress | None = None,
    ) -> Mapping[str, np.ndarray]:
        """`rows`: of the one tensor that is named; a run of whole blocks."""

    async def runs(
        self, root: Digest, ctx: RequestContext, runs: Sequence[Run], *, progress: Progress | None = None
    ) -> Sequence[np.ndarray]:
        """Runs of rows of several tensors at once."""


class Int8Source(Protocol):
    """Versions that were made in int8 once, at a param-server: peers/weights.py."""

    def in_int8(self, root: Digest) -> tuple[Digest, Digest] | None:
        """(version in fp32, the one made of it in int8), where `root` is one of such two and both can be fetched."""

    def int8_is_coming(self, root: Digest, nbytes: int) -> bool:
        """Whether the one in int8 is being made of it, of `nbytes` in fp32, and is better waited for."""

    async def stored(
        self,
        root: Digest,
        ctx: RequestContext,
        names: Collection[str] | None = None,
        *,
        rows: slice | None = None,
        progress: Progress | None = None,
    ) -> Mapping[str, Any]:
        """As WeightSource.tensors; matrices in int8 as Int8Rows."""


Fetch: TypeAlias = Callable[..., Awaitable[Mapping[str, Any]]]
"""As WeightSource.tensors."""
FetchRuns: TypeAlias = Callable[..., Awaitable[Sequence[np.ndarray]]]
"""As WeightSource.runs."""
