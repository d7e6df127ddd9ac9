from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdbus.weights.blocks import (
    BLOCK_BYTES,
    DTYPES,
    SHARDS,
    block_count,
    block_span,
    cut,
    dtype_name,
    rows_per_block,
    shard_of,
    tensor_bytes,
)

shapes = st.lists(st.integers(0, 300_000), max_size=3).map(tuple)
dtypes = st.sampled_from(sorted(DTYPES))


@pytest.mark.parametrize(
    ("shape", "rows"),
    [
        ((49152, 576), 113),
        ((576,), 65536),
        ((1, 65536), 1),
        ((2, 65537), 1),
        ((4, 32768), 2),
        ((), 65536),
        ((5, 0), 262144),
    ],
)
def test_rows_per_block_is_the_rule_of_the_design(shape: tuple[int, ...], rows: int) -> None:
    assert rows_per_block(shape, "fp32") == rows


@given(shapes, dtypes)
def test_spans_cover_the_tensor_without_gap_or_overlap(shape: tuple[int, ...], dtype: str) -> None:
    if block_count(shape, dtype) > 5_000:
        return
    end = 0
    for index in range(block_count(shape, dtype)):
        start, size = block_span(shape, dtype, index)
        assert start == end
        assert size > 0
        end += size
    assert end == tensor_bytes(shape, dtype)


@given(shapes, dtypes)
def test_a_block_is_whole_rows_and_at_most_256_kib_unless_a_row_is_larger(shape: tuple[int, ...], dtype: str) -> None:
    if block_count(shape, dtype) == 0:
        return
    row = math.prod(shape[1:]) * DTYPES[dtype].itemsize
    _, size = block_span(shape, dtype, 0)
    assert size % row == 0
    assert size <= max(BLOCK_BYTES, row)


def test_cut_yields_the_bytes_in_little_endian_c_order() -> None:
    array = np.arange(200_000, dtype=np.float32).reshape(100, 2000)
    expected = array.astype("<f4").tobytes()
    for form in (array, np.asfortranarray(array), array.astype(">f4"), array[::1]):
        assert b"".join(cut(form)) == expected
    assert [len(block) for block in cut(array)] == [32 * 8000, 32 * 8000, 32 * 8000, 4 * 8000]


def test_a_tensor_without_dimensions_is_one_block_and_an_empty_one_none() -> None:
    assert [bytes(block) for block in cut(np.array(1.5, dtype=np.float32))] == [np.float32(1.5).tobytes()]
    assert list(cut(np.zeros((0, 7), dtype=np.float32))) == []
    assert list(cut(np.zeros((7, 0), dtype=np.float32))) == []


def test_a_dtype_that_no_manifest_can_hold_is_refused() -> None:
    with pytest.raises(ValueError, match="float64"):
        dtype_name(np.dtype(np.float64))


def test_shards_are_stable_and_evenly_used() -> None:
    assert [shard_of("model.embed_tokens.weight", index) for index in range(4)] == [46, 34, 55, 25]  # golden
    used = np.bincount([shard_of("model.embed_tokens.weight", i) for i in range(6400)], minlength=SHARDS)
    assert used.min() > 50
    assert used.max() < 160
