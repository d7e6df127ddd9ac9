"""What computes, behind one interface: it builds versions of a model, and makes the pool that they compute from."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, Protocol, TypeAlias, TypeVar

import numpy as np

from pdbus.kv.codec import PagePool
from pdbus.kv.format import PageFormat
from pdbus.messages.common import Digest
from pdbus.model.batch import Batch
from pdbus.model.config import ModelConfig
from pdbus.model.parts import Part

Array: TypeAlias = "np.ndarray[Any, Any]"
M = TypeVar("M")
M_co = TypeVar("M_co", covariant=True)


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


class Builder(Protocol[M_co]):
    """Makes one version out of parts, for one caller at a time. Keeps no part that was given: only what it makes."""

    parts: tuple[Part, ...]
    """What has to be given, in this order."""

    def add(self, part: Part, arrays: Mapping[str, Array]) -> None:
        """Takes a copy of the part, in the form that is computed with.

        Raises Corrupt where a tensor is missing or not as the config asks."""

    def finish(self) -> M_co:
        """Once all parts were given."""


class Backend(Protocol):
    """Builds models of one precision; used by one engine. All of its models' pages have one layout and KV dtype."""

    compute_class: str
    takes_int8: bool
    """Whether its builders compute with Int8Rows (weights/packed.py) as they are, and would make the same of fp32."""

    def begin(
        self,
        config: ModelConfig,
        digests: Mapping[str, Digest],
        reuse: Model | None,
        packed: Mapping[str, str] = MappingProxyType({}),
    ) -> Builder[Model]:
        """A version beside `reuse`, of which it shares each layer that has the same digest there. `packed`: dtypes of
        the tensors that are stored in others than fp32.

        Raises InvalidRequest for a model that can't be computed."""

    def build(
        self, config: ModelConfig, digests: Mapping[str, Digest], tensors: Mapping[str, Array], reuse: Model | None
    ) -> Model:
        """At once, from fp32 tensors at hand. Raises as `begin` and `Builder.add`."""
        return built(self.begin(config, digests, reuse), tensors)

    def page_format(self, config: ModelConfig) -> PageFormat:
        """Of the pages that such a model computes from."""

    def pool(self, page_format: PageFormat, pages: int) -> PagePool: ...

    def close(self) -> None:
        """Nothing may be computing any more."""


def built(builder: Builder[M], tensors: Mapping[str, Array]) -> M:
    """The version whose tensors are at hand. They are asked for part by part: a lazy mapping keeps little in memory."""
    for part in builder.parts:
        builder.add(part, part.of(tensors))
    return builder.finish()
