"""A layer that is packed a few rows at a time is the same, to the byte, as one that is packed at once."""

from __future__ import annotations

import numpy as np
import pytest

from pdbus.native import pack_runs as subject
from pdbus.native.abi import address
from pdbus.native.pack_runs import PackedRuns
from tests.unit.native.test_native_linear import KINDS, packed, random


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("outputs", [16, 100, 96])
@pytest.mark.parametrize("biased", [False, True])
def test_runs_make_the_same_bytes(monkeypatch: pytest.MonkeyPatch, kind: str, outputs: int, biased: bool) -> None:
    monkeypatch.setattr(subject, "_RUN_BYTES", 1)
    weight, bias = random(outputs, 64), random(outputs, seed=1) if biased else None
    whole, _ = packed(kind, weight, bias)
    runs = PackedRuns(outputs, lambda rows, biases: packed(kind, rows, biases)[0])
    for rows in (slice(0, 48), slice(48, None)):
        if len(weight[rows]):
            runs.add(weight[rows], None if bias is None else bias[rows])
    made = runs.packed()
    for ours, theirs in zip(made.arrays, whole.arrays, strict=True):
        assert (ours is None) == (theirs is None)
        assert ours is None or theirs is None or (ours.dtype == theirs.dtype and np.array_equal(ours, theirs))
    kept = ("kind", "outputs", "inputs", "reserved")
    assert [getattr(made.struct, name) for name in kept] == [getattr(whole.struct, name) for name in kept]
    pointers = (made.struct.weight, made.struct.scale, made.struct.bias)
    assert pointers == tuple(address(array) for array in made.arrays)
