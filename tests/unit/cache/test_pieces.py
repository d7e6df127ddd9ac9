"""Values cut into pieces come together again, whatever their sizes, and a piece fits into a frame where it can."""

from __future__ import annotations

import random

from hypothesis import given, settings
from hypothesis import strategies as st

from pdbus.bus.bulk_frames import FRAME_BYTES
from pdbus.cache.pieces import pieces, runs

SIZES = st.lists(st.sampled_from([30, 60, 61, 195_840, 737_280, 5_000_000]), min_size=1, max_size=60)


@given(SIZES, st.sampled_from([0, 1, 30]), st.randoms(use_true_random=False))
def test_runs_are_neighbours_of_one_size_and_leave_nothing_out(
    sizes: list[int], parts: int, rng: random.Random
) -> None:
    loads = [rng.choice((0, size)) for size in sizes]
    known = [(index, size, loads[index]) for index, size in enumerate(sizes) if rng.random() < 0.8]
    cut = [known[run] for run in runs(known, parts, 4 << 20)]
    assert [one for run in cut for one in run] == known
    for run in cut:
        first, size, load = run[0]
        assert run == [(first + at, size, load) for at in range(len(run))]
        assert len(run) == 1 or (parts and size % parts == 0 and sum(load for *_, load in run) <= 4 << 20)


def test_what_is_in_memory_travels_layer_by_layer_however_much_it_is() -> None:
    known = [(index, 737_280, 0) for index in range(96)]
    assert runs(known, 30, 4 << 20) == [slice(0, 96)]
    parts = [head.part for head, _ in pieces(0, [bytes(737_280)] * 96, 30)]
    assert parts == sorted(parts)


@settings(deadline=None, max_examples=30)
@given(st.integers(1, 20), st.sampled_from([30, 60, 195_840, 737_280]), st.sampled_from([0, 1, 30]))
def test_pieces_put_together_are_the_values(count: int, size: int, parts: int) -> None:
    count = count if parts else 1
    values = [random.Random(number).randbytes(size) for number in range(count)]
    came = [bytearray() for _ in values]
    for head, body in pieces(7, values, parts):
        assert len(body) <= FRAME_BYTES or (head.count == 1 and head.parts <= 1)
        many = len(body) // head.count
        for at, one in enumerate(came[head.index - 7 : head.index - 7 + head.count]):
            assert head.part * (size // (parts or 1)) == len(one)
            one += body[at * many : (at + 1) * many]
    assert came == values


def test_a_value_that_the_parts_do_not_divide_travels_whole() -> None:
    ((head, body),) = pieces(3, [b"seven b"], 2)
    assert (head.index, head.count, head.parts, body) == (3, 1, 0, b"seven b")
