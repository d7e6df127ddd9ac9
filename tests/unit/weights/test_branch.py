"""Entries of a staging branch make, block by block, what the same pushes make of the whole tensor."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pdbus.errors import Corrupt, InvalidRequest
from pdbus.messages.updates import BranchEntry
from pdbus.weights.blocks import block_count, block_span
from pdbus.weights.branch import ENTRY_BYTES, Change, element_entries, row_entries, run_entries
from pdbus.weights.layer import Tensor

SHAPES = [(300, 700), (5,), (), (3, 2, 4), (2, 70_000)]


def tensor(shape: tuple[int, ...]) -> Tensor:
    return Tensor("t", "fp32", shape, (b"",) * block_count(shape, "fp32"))


def apply(entry: BranchEntry, name: Tensor, array: np.ndarray) -> np.ndarray:
    """By blocks, as a seal does; only those are touched that the change says."""
    flat = array.reshape(-1).copy()
    change = Change(entry, name)
    spans = {i: [n // 4 for n in block_span(name.shape, "fp32", i)] for i in change.blocks}
    blocks = {i: flat[start : start + size].copy() for i, (start, size) in spans.items()}
    change.apply(blocks)
    for i, (start, size) in spans.items():
        flat[start : start + size] = blocks[i]
    return flat.reshape(array.shape)


@settings(max_examples=40)
@given(
    st.sampled_from(SHAPES),
    st.lists(st.tuples(st.sampled_from(["set", "add"]), st.sampled_from("wre"), st.integers(0)), max_size=4),
)
def test_pushes_in_order(shape: tuple[int, ...], pushes: list[tuple[Any, str, int]]) -> None:
    name = tensor(shape)
    array = np.random.default_rng(0).random(shape, np.float32)
    expected = array.copy()
    for how, kind, seed in pushes:
        rng = np.random.default_rng(seed)
        count = (shape[0] if shape else 1) if kind == "r" else expected.size
        at = rng.permutation(count)[: rng.integers(0, min(count, 40) + 1)]
        target = expected.reshape(count, -1) if kind == "r" else expected.reshape(-1)
        if kind == "w":
            at = np.arange(count)
        values = rng.normal(size=target[at].shape).astype(np.float32)
        target[at] = values if how == "set" else target[at] + values
        if kind == "w":
            entries = list(run_entries(name, how, values))
        else:
            entries = list((row_entries if kind == "r" else element_entries)(name, how, at, values))
        assert all(len(entry.at) + len(entry.values) <= ENTRY_BYTES + 8 for entry in entries)
        for entry in entries:
            array = apply(entry, name, array)
    assert array.tobytes() == expected.tobytes()


def test_what_does_not_fit_is_corrupt() -> None:
    name = tensor((4, 3))
    four = np.arange(4, dtype="<f4").tobytes()
    at = np.arange(4, dtype="<u8")
    for entry in (
        BranchEntry("t", "set", "run", at[:1].tobytes(), np.zeros(13, "<f4").tobytes()),
        BranchEntry("t", "set", "run", (at[:1] + 9).tobytes(), four),
        BranchEntry("t", "set", "run", b"", four),
        BranchEntry("t", "add", "rows", at[:1].tobytes(), four),
        BranchEntry("t", "add", "rows", (at[:1] + 4).tobytes(), four[:12]),
        BranchEntry("t", "set", "elements", (at + 9).tobytes(), four),
        BranchEntry("t", "set", "elements", at.tobytes(), four[:-1]),
        BranchEntry("t", "set", "elements", b"\xff" * 8, four[:4]),
    ):
        with pytest.raises(Corrupt):
            Change(entry, name)
    with pytest.raises(InvalidRequest, match="too long"):
        list(row_entries(tensor((2, 10**6)), "set", np.array([0]), np.zeros((1, 10**6), np.float32)))
