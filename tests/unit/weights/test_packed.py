from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from pdbus.model.convert import converted
from pdbus.model.quantize import Groups8, groups8
from pdbus.model.quantize import widened as widened_by_engine
from pdbus.weights.blocks import block_count, block_span, is_dtype, row_bytes, tensor_bytes
from pdbus.weights.packed import Int8Rows, fp8_codes, fp8_values, pack_floats, widened

rows = hnp.arrays(np.float32, (3, 64), elements=st.floats(-1e4, 1e4, width=32))


@pytest.mark.parametrize(("dtype", "kind"), [("fp16", torch.float16), ("bf16", torch.bfloat16)])
@settings(max_examples=30)
@given(values=rows)
def test_half_precisions_round_as_torch_does_and_widen_exactly(
    dtype: str, kind: torch.dtype, values: np.ndarray
) -> None:
    expected = torch.from_numpy(values).to(kind).float().numpy()
    assert np.array_equal(widened(dtype, pack_floats(values, dtype), values.shape), expected)


def test_fp8_is_the_e4m3_of_torch() -> None:
    bits = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).float().numpy()
    assert np.array_equal(fp8_values(), bits, equal_nan=True)


@given(hnp.arrays(np.float32, (64,), elements=st.floats(-448, 448, width=32)))
def test_fp8_codes_are_the_nearest(values: np.ndarray) -> None:
    expected = torch.from_numpy(values).to(torch.float8_e4m3fn).view(torch.uint8).numpy()
    assert np.array_equal(fp8_codes(values), expected)


@settings(max_examples=30)
@given(rows)
def test_fp8_rows_have_a_scale_each_and_are_near(values: np.ndarray) -> None:
    wide = widened("fp8", pack_floats(values, "fp8"), values.shape)
    most = np.abs(values).max(1, keepdims=True)
    assert (np.abs(wide - values) <= np.maximum(np.abs(values) / 16, most / 448 / 512) * 1.01 + 1e-38).all()
    assert not widened("fp8", pack_floats(np.zeros((2, 4), np.float32), "fp8"), (2, 4)).any()


@settings(max_examples=30)
@given(rows)
def test_int8_is_what_the_native_engine_quantises_to(values: np.ndarray) -> None:
    packed = converted("w", values, "int8")
    made, own = Int8Rows.unpacked(packed, 64), groups8(values)
    assert np.array_equal(made.weight, own.weight)
    assert np.array_equal(made.scale, own.scale)
    assert np.array_equal(made.packed(), packed)
    assert np.array_equal(widened("int8", packed, values.shape), widened_by_engine(Groups8(*own)))
    assert np.array_equal(made[1:2].widened(), made.widened()[1:2])


@pytest.mark.parametrize("dtype", ["fp16", "bf16", "fp8", "int8"])
def test_rows_are_cut_into_blocks_as_those_of_other_tensors(dtype: str) -> None:
    shape = (10_000, 96)
    packed = converted("w", np.ones(shape, np.float32), dtype)
    assert packed.shape == (shape[0], row_bytes(shape, dtype))
    spans = [block_span(shape, dtype, index) for index in range(block_count(shape, dtype))]
    assert sum(size for _, size in spans) == tensor_bytes(shape, dtype) == packed.nbytes
    assert all(start % row_bytes(shape, dtype) == 0 and size <= 262_144 for start, size in spans)


def test_what_has_no_such_form() -> None:
    assert not is_dtype("int8", (4, 33))
    assert not is_dtype("fp16", ())
    assert not is_dtype("fp4", (4, 32))
    assert is_dtype("int8", (4, 64))
