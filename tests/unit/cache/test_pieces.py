"""Values cut into pieces come together again, whatever their sizes, and a piece fits into a frame where it can."""

from __future__ import annotations

import random

from hypothesis import given
from hypothesis import strategies as st

from pdbus.bus.bulk_frames import FRAME_BYTES
from pdbus.cache.pieces import pieces, runs

SIZES = st.lists(st.sampled_from([30, 60, 61, 195_840, 737_280, 5_000_000]), min_size=1, max_size=60)


@given(SIZES, st.sampled_from([0, 1, 30]), st.randoms(use_true_random=False))
def test_runs_are_neighbours_of_one_size_and_leave_nothing_out(
    sizes: list[int], parts: int, rng: random.Random
) -> None:
    known = [(index, size) for index, size in enumerate(sizes) if rng.random() < 0.8]
    cut = [known[run] for run in runs(known, parts, 4 << 20)]
    assert [one for run in cut for one in run] == known
    for run in cut:
        first, size = run[0]
        assert run == [(first + at, size) for at in range(len(run))]
        assert len(run) == 1 or (parts and size % parts == 0 and sum(size for _, size in run) <= 4 << 20)


@given(st.integers(1, 20), st.sampled_from([30, 60, 195_840, 737_280]), st.sampled_from([0, 1, 30]))
def test_pieces_put_together_are_the_values(count: int, size: int, parts: int) -> None:
    count = count if parts else 1
    values = [random.Random(number).randbytes(size) for number in range(count)]
    came = [bytearray() for _ in values]
    for head, body in pieces(7, values, parts):
        assert (head.index, head.count) == (7, count)
        assert len(body) <= FRAME_BYTES or not parts or head.parts == 1
        many = len(body) // count
        for at, one in enumerate(came):
            assert head.part * (size // (parts or 1)) == len(one)
            one += body[at * many : (at + 1) * many]
    assert came == values


def test_a_value_that_the_parts_do_not_divide_travels_whole() -> None:
    ((head, body),) = pieces(3, [b"seven b"], 2)
    assert (head.index, head.count, head.parts, body) == (3, 1, 0, b"seven b")
