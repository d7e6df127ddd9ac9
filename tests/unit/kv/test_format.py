from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdbus.errors import InvalidRequest
from pdbus.kv.format import KvDtype, PageFormat

size = st.integers(1, 9999)
dtypes: tuple[KvDtype, ...] = ("fp32", "fp16", "int8")


@given(size, size, size.map(lambda half: 2 * half % 9998 + 2), size, st.sampled_from(dtypes))
def test_the_spelling_reads_back(layers: int, kv_heads: int, head_dim: int, page_tokens: int, dtype: KvDtype) -> None:
    page_format = PageFormat(layers, kv_heads, head_dim, page_tokens, dtype)
    assert PageFormat.parse(str(page_format)) == page_format


def test_golden_spelling_and_sizes_of_the_default_model() -> None:
    page_format = PageFormat(layers=30, kv_heads=3, head_dim=64)
    assert str(page_format) == "kv1-l30-t16-h3-d64-fp32"
    assert page_format.layer_bytes == 2 * 16 * 3 * 64 * 4
    assert page_format.page_bytes == 30 * page_format.layer_bytes
    assert [page_format.pages_for(tokens) for tokens in (0, 1, 16, 17)] == [0, 1, 1, 2]
    assert page_format.pages_within(3 * page_format.page_bytes + 1) == 3


def test_golden_sizes_of_the_smaller_dtypes() -> None:
    half, byte = (PageFormat(layers=30, kv_heads=3, head_dim=64, dtype=dtype) for dtype in ("fp16", "int8"))
    assert (str(half), half.layer_bytes) == ("kv1-l30-t16-h3-d64-fp16", 2 * 16 * 3 * 64 * 2)
    assert (str(byte), byte.layer_bytes) == ("kv1-l30-t16-h3-d64-int8", 2 * 16 * 3 * (64 + 4))
    assert byte.page_bytes <= 0.55 * half.page_bytes


def test_the_layout_of_the_native_kernels_has_a_name_of_its_own() -> None:
    page_format = PageFormat(layers=30, kv_heads=3, head_dim=64, dtype="int8", layout="kv3")
    assert str(page_format) == "kv3-l30-t16-h3-d64-int8"
    assert PageFormat.parse(str(page_format)) == page_format
    assert page_format.layer_bytes == 3 * 2 * (16 * 64 + 16 * 4)
    with pytest.raises(ValueError, match="16 tokens"):
        PageFormat(layers=30, kv_heads=3, head_dim=64, page_tokens=8, layout="kv3")


def test_scales_that_would_not_be_aligned_are_refused() -> None:
    with pytest.raises(ValueError, match="aligned"):
        PageFormat(layers=1, kv_heads=1, head_dim=1, page_tokens=1, dtype="int8")
    with pytest.raises(InvalidRequest):
        PageFormat.parse("kv1-l1-t1-h1-d1-int8")


@pytest.mark.parametrize(
    "text",
    [
        "",
        "kv1",
        "kv2-l30-t16-h3-d64-fp32",
        "kv3-l30-t8-h3-d64-fp32",
        "kv1-l0-t16-h3-d64-fp32",
        "kv1-l30-t16-h3-d64-int3",
        "x" * 10_000,
    ],
)
def test_another_spelling_is_refused(text: str) -> None:
    with pytest.raises(InvalidRequest):
        PageFormat.parse(text)


def test_a_size_of_zero_is_refused() -> None:
    with pytest.raises(ValueError, match="at least 1"):
        PageFormat(layers=0, kv_heads=1, head_dim=1)
