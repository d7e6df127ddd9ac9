"""What is sent of a prompt's KV: all of it once, in order within each layer, in few pieces that fit into a frame."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from pdbus.kv.format import PageFormat
from pdbus.prefill.pieces import Piece, Pieces

FORMAT = PageFormat(layers=5, kv_heads=1, head_dim=2, page_tokens=4)


def pieces(pages: int) -> Pieces:
    """Of at most so many pages."""
    return Pieces(FORMAT, pages * FORMAT.layer_bytes + 1)


def rest(of: Pieces) -> list[Piece]:
    return list(iter(lambda: of.take(all=True), None))


def test_neighbouring_layers_share_a_piece_as_long_as_it_fits() -> None:
    some = pieces(5)
    for layer in range(5):
        some.computed(layer, 0, 8)
    assert rest(some) == [Piece(0, 2, 0, 8), Piece(2, 2, 0, 8), Piece(4, 1, 0, 8)]


def test_a_piece_waits_until_it_can_grow_no_more() -> None:
    some = pieces(4)
    some.computed(0, 0, 8)
    assert some.take(all=False) is None
    some.computed(1, 0, 8)
    assert some.take(all=False) == Piece(0, 2, 0, 8)
    for layer in (2, 3, 4):
        some.computed(layer, 0, 8)
    assert some.take(all=False) == Piece(2, 2, 0, 8)
    assert some.take(all=False) == Piece(4, 1, 0, 8)  # the last layer
    some.computed(0, 8, 4)
    assert some.take(all=False) is None
    assert some.take(all=True) == Piece(0, 1, 8, 4)


def test_what_was_cached_comes_first() -> None:
    some = pieces(10)
    some.computed(0, 8, 4)
    some.cached(8)
    assert rest(some) == [Piece(0, 5, 0, 8), Piece(0, 1, 8, 4)]


def test_a_long_chunk_is_cut_at_page_ends() -> None:
    some = pieces(2)
    some.computed(0, 4, 18)
    assert rest(some) == [Piece(0, 1, 4, 8), Piece(0, 1, 12, 8), Piece(0, 1, 20, 2)]


def test_a_pass_that_was_given_up_and_computed_again_is_sent_once() -> None:
    some = pieces(4)
    some.computed(0, 0, 8)
    some.computed(0, 0, 4)
    some.computed(0, 4, 8)
    assert rest(some) == [Piece(0, 1, 0, 8), Piece(0, 1, 8, 4)]


@given(
    st.integers(1, 30),
    st.integers(0, 6),
    st.lists(st.integers(1, 9), min_size=1, max_size=4),
    st.lists(st.booleans(), max_size=40),
)
def test_all_is_sent_once_and_in_order(most: int, cached: int, chunks: list[int], looks: list[bool]) -> None:
    """`looks`: whether the sender has its turn after each layer."""
    some, sent, ends = pieces(most), [], [0] * FORMAT.layers
    some.cached(cached * 4)
    start, turns = cached * 4, iter(looks)
    for pages in chunks:
        for layer in range(FORMAT.layers):
            some.computed(layer, start, pages * 4)
            while next(turns, False) and (piece := some.take(all=False)):
                sent.append(piece)
        start += pages * 4
    for piece in [*sent, *rest(some)]:
        assert piece.layers * FORMAT.pages_for(piece.tokens) <= max(most, 1)
        for layer in range(piece.layer, piece.layer + piece.layers):
            assert piece.start == ends[layer]
            ends[layer] += piece.tokens
    assert ends == [start] * FORMAT.layers
