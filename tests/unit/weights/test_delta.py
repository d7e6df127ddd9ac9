from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdbus.errors import Corrupt
from pdbus.weights.delta import applied, low_rank, plus_product, sparse

BLOCK = np.arange(4096, dtype="<f4")


@given(st.sampled_from([1, 2, 4]), st.binary(min_size=512, max_size=4096), st.data())
def test_a_sparse_delta_makes_the_target_of_its_base(element_bytes: int, content: bytes, data: st.DataObject) -> None:
    base = content[: len(content) // 4 * 4]
    target = bytearray(base)
    for at in data.draw(st.lists(st.integers(0, len(base) - 1), max_size=20)):
        target[at] ^= data.draw(st.integers(1, 255))
    delta = sparse(base, target, element_bytes)
    if delta is not None:
        assert len(delta) < len(target)
        assert applied("sparse", base, delta) == target


def test_elements_are_compared_as_bits() -> None:
    base = np.array([0.0, np.nan, 1.0] * 100, "<f4")
    target = base.copy()
    target[0] = -0.0
    target[1:2].view("<u4")[0] ^= 1  # another NaN
    delta = sparse(base.tobytes(), target.tobytes(), 4)
    assert delta is not None
    assert applied("sparse", base.tobytes(), delta) == target.tobytes()


def test_a_block_that_is_new_all_over_is_no_smaller_as_a_delta() -> None:
    assert sparse(BLOCK.tobytes(), (BLOCK + 1).tobytes(), 4) is None


def test_far_changes_take_wider_gaps() -> None:
    for distance in (10, 300, 70_000):
        base = bytes(4 * (distance + 2))
        target = base[:-4] + b"\1\2\3\4"
        delta = sparse(base, target, 4)
        assert delta is not None
        assert applied("sparse", base, delta) == target


def test_a_low_rank_delta_adds_the_product_as_its_maker_computed_it() -> None:
    rng = np.random.default_rng(0)
    base, a, b = (rng.normal(size=size).astype("<f4") for size in ((64, 96), (64, 4), (4, 96)))
    assert applied("low_rank", base.tobytes(), low_rank(a, b)) == plus_product(base, a, b).tobytes()


def test_whole_blocks_replace_whatever_was_there() -> None:
    assert applied("whole", b"old", b"new block") == b"new block"


@given(st.binary(max_size=64), st.sampled_from(["sparse", "low_rank"]))
def test_garbage_is_refused(body: bytes, form: str) -> None:
    with pytest.raises(Corrupt):
        applied(form, BLOCK.tobytes(), body)  # type: ignore[arg-type]


@given(st.integers(0, 3000), st.integers(1, 255))
def test_a_damaged_delta_is_refused_or_changes_nothing_but_values(at: int, flip: int) -> None:
    target = BLOCK.copy()
    target[::8] += 1
    delta = sparse(BLOCK.tobytes(), target.tobytes(), 4)
    assert delta is not None
    damaged = bytearray(delta)
    damaged[at % len(delta)] ^= flip
    try:
        result = applied("sparse", BLOCK.tobytes(), damaged)
    except Corrupt:
        return
    assert len(result) == BLOCK.nbytes


def test_a_base_of_another_size_is_refused() -> None:
    delta = sparse(BLOCK.tobytes(), BLOCK.tobytes()[:-4] + b"abcd", 4)
    assert delta is not None
    with pytest.raises(Corrupt, match="beyond"):
        applied("sparse", BLOCK.tobytes()[:-4], delta)
    with pytest.raises(ValueError, match="base of"):
        sparse(b"1234", b"12345678", 4)
    with pytest.raises(Corrupt, match="does not fit"):
        applied("low_rank", b"1234", low_rank(np.ones((2, 1), "<f4"), np.ones((1, 2), "<f4")))
