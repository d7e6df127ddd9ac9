"""What computes, behind one interface: it builds versions of a model, and makes the pool that they compute from."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any, Protocol, TypeAlias, TypeVar

import numpy as np

from pdbus.kv.codec import PagePool
from pdbus.kv.format import NO_STREAMS, PageFormat, StreamFormat
from pdbus.messages.common import Digest
from pdbus.model.batch import Batch
from pdbus.model.config import ModelConfig
from pdbus.model.parts import NO_CHANGES, NO_TENSORS, Changes, Part, Patch, Tensors

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

    @property
    def kind(self) -> Hashable:
        """Versions of an equal kind can be computed in one step."""

    def forward(
        self,
        batch: Batch,
        pool: Any,
        on_layer: Callable[[int], None] | None = None,
        *,
        beside: Sequence[tuple[Any, Batch]] = (),
    ) -> Array:
        """Computes one step; returns fp32 logits [len(batch.logit_rows), vocab]. `pool`: of the same backend.

        K and V of the batch's tokens are in the pool afterwards. `on_layer(i)` is called as soon as those of layer i
        are; what it raises ends the step in its middle, and is raised here.

        `beside`: (version, its batch), of the same kind, computed in the same step; their logits follow. Where
        neighbours share a layer (or the embedding, or the head), the rows of both go through it together."""


class Builder(Protocol[M_co]):
    """Makes one version out of parts, for one caller at a time. Keeps no part that was given: only what it makes."""

    parts: tuple[Part, ...]
    """What has to be given, in this order."""

    patches: tuple[Patch, ...]
    """What has to be given besides, in any order."""

    def patch(self, patch: Patch, arrays: Sequence[Array]) -> None:
        """Puts rows, an array for each run, into copies of what the older version has of their layers."""

    def add(self, part: Part, arrays: Mapping[str, Any]) -> None:
        """Takes a copy of the part, in the form that is computed with. `arrays`: fp32; matrices may be Int8Rows
        (weights/packed.py) where the backend takes these.

        Raises Corrupt where a tensor is missing or not as the config asks."""

    def finish(self) -> M_co:
        """Once all parts and patches were given."""


class Backend(Protocol):
    """Builds models of one precision; used by one engine. All of its models' pages have one layout and KV dtype."""

    compute_class: str
    layer_groups: int
    """Runs of layers whose pages are kept apart across updates: 1, all layers, or more, with what enters them."""
    takes_int8: bool
    """Whether its builders compute with Int8Rows (weights/packed.py) as they are, and would make the same of fp32."""

    def begin(
        self,
        config: ModelConfig,
        digests: Mapping[str, Digest],
        reuse: Model | None,
        changes: Changes = NO_CHANGES,
        tensors: Tensors = NO_TENSORS,
    ) -> Builder[Model]:
        """A version beside `reuse`, of which it shares each layer that has the same digest there.

        `changes`: of layers that differ from those of `reuse` in some blocks only, the rows that do. `tensors`: of the
        version by name, as they are fetched, which may be in other dtypes than fp32 (then `changes` has to be empty);
        without them nothing is looked for on disk, and none can be streamed.

        Raises InvalidRequest for a model that can't be computed."""

    def build(
        self, config: ModelConfig, digests: Mapping[str, Digest], tensors: Mapping[str, Array], reuse: Model | None
    ) -> Model:
        """At once, from fp32 tensors at hand. Raises as `begin` and `Builder.add`."""
        return built(self.begin(config, digests, reuse), tensors)

    def page_format(self, config: ModelConfig) -> PageFormat:
        """Of the pages that such a model computes from."""

    def pool(self, page_format: PageFormat, pages: int, streams: StreamFormat = NO_STREAMS) -> PagePool: ...

    def close(self) -> None:
        """Nothing may be computing any more."""


def built(builder: Builder[M], tensors: Mapping[str, Array]) -> M:
    """The version whose tensors are at hand. They are asked for part by part: a lazy mapping keeps little in memory."""
    for part in builder.parts:
        builder.add(part, part.of(tensors))
    return builder.finish()
