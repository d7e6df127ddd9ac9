"""Linear layers: what each kernel promises to compute, alone, in company, and on every instruction set."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pdbus.model.quantize import groups4, groups8, rows8, widened
from pdbus.native.build import levels
from pdbus.native.library import NativeEngine
from pdbus.native.pack import PackedLinear, pack_f32, pack_g4, pack_g8, pack_i8

Array = np.ndarray[Any, Any]
KINDS = ("f32", "i8", "g4", "g8")


def random(*shape: int, seed: int = 0) -> Array:
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def packed(kind: str, weight: Array, bias: Array | None = None) -> tuple[PackedLinear, Array]:
    """The layer, and the fp32 weight that it stands for."""
    match kind:
        case "i8":
            rows = rows8(weight)
            return pack_i8(*rows, bias), widened(rows)
        case "g4":
            fours = groups4(weight)
            return pack_g4(*fours, bias), widened(fours)
        case "g8":
            eights = groups8(weight)
            return pack_g8(*eights, bias), widened(eights)
        case _:
            return pack_f32(weight, bias), weight


def quantised_rows(x: Array, kind: str) -> Array:
    """What the kernels make of activations: 8 bits, a scale per row or per 32 values."""
    if kind == "f32":
        return x
    groups = x.reshape(len(x), -1, x.shape[1] if kind == "i8" else 32)
    peak = np.abs(groups).max(-1, keepdims=True)
    steps = np.rint(groups * np.divide(np.float32(127), peak, out=np.zeros_like(peak), where=peak > 0))
    dequantised: Array = (steps * (peak / np.float32(127))).reshape(x.shape)
    return dequantised


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("outputs", "inputs"), [(16, 32), (23, 64), (320, 576), (576, 1536)])
def test_equals_the_product_of_what_was_quantised(engine: NativeEngine, kind: str, outputs: int, inputs: int) -> None:
    x, bias = random(9, inputs), random(outputs, seed=2)
    layer, weight = packed(kind, random(outputs, inputs, seed=1), bias)
    wanted = quantised_rows(x, kind).astype(np.float64) @ weight.T.astype(np.float64) + bias
    assert np.abs(engine.linear(layer.struct, x) - wanted).max() < 2e-6 * inputs


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("inputs", [128, 1536])
def test_the_largest_values_do_not_saturate(engine: NativeEngine, kind: str, inputs: int) -> None:
    x = np.where(np.arange(inputs) % 3 == 0, -1.0, 1.0).astype(np.float32)[None].repeat(5, 0)
    layer, weight = packed(kind, np.sign(random(32, inputs)))
    assert np.allclose(engine.linear(layer.struct, x), x @ weight.T, rtol=1e-3, atol=1e-2)


@pytest.mark.parametrize("kind", KINDS)
def test_a_row_does_not_depend_on_its_neighbours(engine: NativeEngine, kind: str) -> None:
    x = random(301, 576) * np.exp(random(301, 1, seed=3))
    layer, _ = packed(kind, random(320, 576, seed=1))
    together = engine.linear(layer.struct, x)
    for start, stop in ((0, 1), (5, 7), (17, 20), (128, 301), (300, 301)):
        assert np.array_equal(engine.linear(layer.struct, x[start:stop]), together[start:stop])


@pytest.mark.parametrize("kind", KINDS)
def test_every_instruction_set_gives_the_same_bits(library_folder: Path, kind: str) -> None:
    if len(levels()) < 2:
        pytest.skip("this machine has one instruction set only")
    x = random(13, 1536)
    layer, _ = packed(kind, random(48, 1536, seed=1), random(48, seed=2))
    results = []
    for level in levels():
        with NativeEngine(1, level, library_folder) as one:
            results.append(one.linear(layer.struct, x).tobytes())
    assert len(set(results)) == 1


def test_rows_of_zeros_and_of_tiny_values(engine: NativeEngine) -> None:
    for kind in KINDS:
        layer, weight = packed(kind, random(32, 64))
        x = np.stack((np.zeros(64, np.float32), random(64) * np.float32(1e-30)))
        out = engine.linear(layer.struct, x)
        assert not out[0].any()
        assert np.allclose(out[1], x[1] @ weight.T, rtol=0.1, atol=1e-30)


@pytest.mark.parametrize(("size", "block"), [(512, 512), (1536, 512), (96, 32), (64, 16)])
def test_hadamard_is_orthogonal_and_its_own_inverse(engine: NativeEngine, size: int, block: int) -> None:
    x = random(size)
    turned = x.copy()
    engine.hadamard(turned, block)
    first = x[:block] @ np.where([[(i & j).bit_count() % 2 for j in range(block)] for i in range(block)], -1.0, 1.0)
    assert np.allclose(turned[:block], first / np.sqrt(block), atol=1e-5)
    engine.hadamard(turned, block)
    assert np.allclose(turned, x, atol=1e-5)


@pytest.mark.parametrize(("size", "k"), [(1000, 1), (1000, 20), (37, 20), (7, 20)])
def test_top_is_a_stable_sort_with_its_log_sum(engine: NativeEngine, size: int, k: int) -> None:
    logits = np.round(random(5, size) * 4)  # with many equal values
    ids, values, log_sums = engine.top(logits, k)
    order = np.argsort(-logits, axis=1, kind="stable")[:, :k]
    assert np.array_equal(ids, order)
    assert np.array_equal(values, np.take_along_axis(logits, order, 1))
    assert np.allclose(log_sums, np.log(np.exp(logits.astype(np.float64)).sum(1)), atol=1e-5)
