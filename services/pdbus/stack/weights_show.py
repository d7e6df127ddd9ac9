"""`pdbus weights show`: from a version, or an answer's `system_fingerprint`, to who made it and what changed."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence

from rich.table import Column, Table

from pdbus.client.weights import Lineage, Weights
from pdbus.client.weights.diff import TensorDiff
from pdbus.errors import PdbusError
from pdbus.stack.attach import Target
from pdbus.stack.view import wide_console
from pdbus.stack.weights import opened
from pdbus.stack.weights_log import when

_MOST_TENSORS = 20


def show(target: Target, name: str) -> int:
    """What is known of one version: where it comes from, and what became of it."""

    async def find() -> tuple[Lineage, int, Sequence[TensorDiff]]:
        async with opened(target) as weights:
            lineage = await weights.lineage(name)
            return lineage, await _size(weights, lineage), await _changed(weights, lineage)

    table = Table(Column(no_wrap=True), "", box=None, show_header=False)
    for row in _rows(*asyncio.run(find())):
        table.add_row(*row)
    wide_console().print(table)
    return 0


async def _size(weights: Weights, lineage: Lineage) -> int:
    """In bytes; 0 where it can't be fetched any more."""
    if not lineage.kept:
        return 0
    try:
        manifest = await weights.manifest(lineage.root)
    except PdbusError:
        return 0
    return sum(tensor.nbytes for tensor in manifest.tensors.values())


async def _changed(weights: Weights, lineage: Lineage) -> Sequence[TensorDiff]:
    """Against its parent; nothing where one of the two can't be fetched any more."""
    if not lineage.kept or lineage.commit.parent is None:
        return ()
    try:
        return await weights.diff(lineage.commit.parent.hex(), lineage.root.hex())
    except PdbusError:
        return ()


def state(lineage: Lineage) -> str:
    """What became of it, in words."""
    if lineage.given_up:
        return f"given up by {lineage.given_up_by}, {when(lineage.given_up.time_ns)}"
    if lineage.refs:
        return f"served as {', '.join(lineage.refs)}"
    if lineage.waiting:
        return f"head of {', '.join(lineage.waiting)}, whose ref follows once workers have it ready"
    if lineage.left is None:
        return "no longer kept"
    kept = "still kept: a ref can go back to it" if lineage.kept else "no longer kept"
    return f"left its last ref {when(lineage.left.time_ns)}; {kept}"


def _rows(lineage: Lineage, size: int, changed: Sequence[TensorDiff]) -> Iterator[tuple[str, str]]:
    commit = lineage.commit
    yield "root", lineage.root.hex()
    if size:
        yield "size", f"{size / 1e6:.1f} MB"
    yield "state", state(lineage)
    yield "refs", ", ".join(lineage.refs) or "none"
    yield "committed", f"{when(lineage.at.time_ns)}, entry {lineage.at.seq}"
    yield "author", commit.author
    yield "message", commit.message
    yield "parent", commit.parent.hex() if commit.parent else "none"
    yield "line", commit.ref or "none"
    if commit.sealed:
        yield "branch", f"{commit.sealed.branch}, entries {commit.sealed.after + 1} to {commit.sealed.upto}"
    yield "changed", ", ".join(layer for layer, _ in commit.layers)
    for one in changed[:_MOST_TENSORS]:
        yield "", f"{one.name}: {len(one.blocks)} of {one.of} blocks"
    if len(changed) > _MOST_TENSORS:
        yield "", f"and {len(changed) - _MOST_TENSORS} tensors more: pdbus weights diff"
