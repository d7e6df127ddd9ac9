"""Which rows of an older version's layers have to be put anew to make them a newer version's."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from pdbus.weights.blocks import Run, rows_per_block
from pdbus.weights.layer import Layer, Tensor, is_computed
from pdbus.weights.manifest import Manifest

_MOST = 0.75
"""Of a layer's bytes: where more changed, it is made anew."""


def changed_rows(old: Manifest, new: Manifest) -> Mapping[str, tuple[Run, ...]]:
    """Layer -> runs of whole blocks, for the layers that differ in some blocks only."""
    before = {layer.name: layer for layer in old.layers}
    changes = {}
    for layer in new.layers:
        known = before.get(layer.name)
        if known is None or not is_computed(layer.name) or known.digest == layer.digest:
            continue
        runs = _runs_of(known, layer)
        if runs is not None:
            changes[layer.name] = runs
    return changes


def _runs_of(old: Layer, new: Layer) -> tuple[Run, ...] | None:
    """None where they differ in more than contents, or in most of them."""
    shapes = [(tensor.name, tensor.dtype, tensor.shape) for tensor in new.tensors]
    if shapes != [(tensor.name, tensor.dtype, tensor.shape) for tensor in old.tensors] or not all(
        tensor.shape for tensor in new.tensors
    ):
        return None
    runs: list[Run] = []
    changed = 0
    for before, after in zip(old.tensors, new.tensors, strict=True):
        found = [*_runs(before, after)]
        rows = sum(run.rows.stop - run.rows.start for run in found)
        changed += after.nbytes * rows // max(1, after.shape[0])
        runs += found
    return tuple(runs) if changed <= _MOST * sum(tensor.nbytes for tensor in new.tensors) else None


def _runs(old: Tensor, new: Tensor) -> Iterator[Run]:
    step = rows_per_block(new.shape, new.dtype)
    start: int | None = None
    for index, (before, after) in enumerate(zip((*old.blocks, None), (*new.blocks, None), strict=True)):
        if before != after and start is None:
            start = index
        elif before == after and start is not None:
            yield Run(new.name, slice(start * step, min(index * step, new.shape[0])))
            start = None
