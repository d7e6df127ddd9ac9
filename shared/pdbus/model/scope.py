"""The prefix scope of a version, made alike by routers (which choose workers by it) and workers. No torch here."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

from pdbus.kv.format import PageFormat
from pdbus.kv.prefix import LayerGroup, PrefixScope
from pdbus.kv.roots import kv_relevant_root, stream_root
from pdbus.messages.common import Digest
from pdbus.model.config import ModelConfig


def prefix_scope(
    config: ModelConfig, tensors: Mapping[str, Digest], page_format: PageFormat, compute_class: str
) -> PrefixScope:
    """The scope of the one layer group that there is, all layers, without a salt.

    Its settings are every field of the config: one that doesn't matter can at worst cost a hit. For each tenant, derive
    one with `dataclasses.replace(scope, salt=…)`."""
    group = LayerGroup(0, config.layers - 1)
    settings = dataclasses.asdict(config)
    return PrefixScope(kv_relevant_root(tensors, group), group, settings, compute_class, page_format, salt=b"")


def stream_scopes(
    scope: PrefixScope, tensors: Mapping[str, Digest], layers: Sequence[int]
) -> tuple[tuple[int, PrefixScope], ...]:
    """For each of these layers the scope of all below it: K and V, and the residual stream that enters the layer.

    `scope`: the version's. Pages with equal keys differ at most from this layer on."""
    return tuple(
        (at, dataclasses.replace(scope, kv_root=stream_root(tensors, at), group=LayerGroup(0, at - 1))) for at in layers
    )
