"""What computes, behind one interface: it builds versions of a model, and makes the pool that they compute from."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Protocol, TypeAlias

import numpy as np

from pdbus.kv.codec import PagePool
from pdbus.kv.format import PageFormat
from pdbus.messages.common import Digest
from pdbus.model.batch import Batch
from pdbus.model.config import ModelConfig

Array: TypeAlias = "np.ndarray[Any, Any]"


class Model(Protocol):
    """One version, ready to compute."""

    @property
    def config(self) -> ModelConfig: ...

    @property
    def digests(self) -> Mapping[str, Digest]:
        """Layer name (`embed`, `layers.0`, …, `head`) -> digest, of what this was built from."""

    def forward(self, batch: Batch, pool: Any, on_layer: Callable[[int], None] | None = None) -> Array:
        """Computes one step; returns fp32 logits [len(batch.logit_rows), vocab]. `pool`: of the same backend.

        K and V of the batch's tokens are in the pool afterwards. `on_layer(i)` is called as soon as those of layer i
        are; what it raises ends the step in its middle, and is raised here."""


class Backend(Protocol):
    """Builds models of one precision; used by one engine. All of its models' pages have one layout and KV dtype."""

    compute_class: str

    def needed(self, config: ModelConfig, digests: Mapping[str, Digest], reuse: Model | None) -> tuple[str, ...]:
        """The tensors that `build` will ask for: those of layers that `reuse` doesn't hold under the same digest."""

    def build(
        self,
        config: ModelConfig,
        digests: Mapping[str, Digest],
        tensors: Mapping[str, Array],
        reuse: Model | None,
    ) -> Model:
        """Copies the needed fp32 tensors into a model, beside `reuse`, whose unchanged layers it shares.

        Raises Corrupt where a tensor is missing or not as `config` asks, InvalidRequest where it can't be computed."""

    def page_format(self, config: ModelConfig) -> PageFormat:
        """Of the pages that such a model computes from."""

    def pool(self, page_format: PageFormat, pages: int) -> PagePool: ...

    def close(self) -> None:
        """Nothing may be computing any more."""
