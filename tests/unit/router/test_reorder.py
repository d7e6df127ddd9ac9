"""Whatever is lost, repeated, reordered or cut differently: each token once and in order (G7)."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from pdbus.messages.router import TokenItem
from pdbus.router.reorder import MOST_HELD, InOrder


def _item(index: int, ids: tuple[int, ...], finish: str | None = None) -> TokenItem:
    return TokenItem("r", 0, 1, b"", index, ids, finish=finish)  # type: ignore[arg-type]


@st.composite
def _runs(draw: st.DrawFn) -> tuple[int, int, list[TokenItem]]:
    """Pieces of 0, 1, 2, … cut in several ways, in any order, some many times; all of it is there at least once."""
    start, length = draw(st.integers(0, 5)), draw(st.integers(1, 12))
    items: list[TokenItem] = []
    for _ in range(draw(st.integers(1, 3))):
        at = start
        while at < start + length:
            size = draw(st.integers(1, 4))
            end = min(at + size, start + length)
            items.append(_item(at, tuple(range(at, end)), "stop" if end == start + length else None))
            at = end
    return start, length, draw(st.permutations(items))


@given(_runs())
def test_each_token_once_and_in_order(run: tuple[int, int, list[TokenItem]]):
    start, length, items = run
    order = InOrder(start)
    out = [ready for item in items for ready in order.add(item)]
    assert [token for item in out for token in item.ids] == list(range(start, start + length))
    assert [item.index for item in out] == sorted(item.index for item in out)
    assert any(item.finish for item in out)
    assert not order.gap


def test_a_gap_is_known_until_it_is_filled():
    order = InOrder(0)
    assert not order.add(_item(1, (1,)))
    assert order.gap
    assert [item.ids for item in order.add(_item(0, (0,)))] == [(0,), (1,)]
    assert not order.gap


def test_an_end_without_tokens_comes_after_all_tokens():
    order = InOrder(0)
    assert not order.add(_item(2, (), "stop"))
    assert [item.finish for item in order.add(_item(0, (0, 1)))] == [None, "stop"]


def test_what_is_held_is_bounded():
    order = InOrder(0)
    for index in range(1, 3 * MOST_HELD):
        order.add(_item(index, (index,)))
    assert len(order.add(_item(0, (0,)))) == MOST_HELD + 1
