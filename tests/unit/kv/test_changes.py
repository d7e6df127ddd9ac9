"""Whoever follows a page table's changes knows what is findable."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from pdbus.errors import Overloaded
from pdbus.kv import changes
from pdbus.kv.changes import Changes
from pdbus.kv.pages import PageTable
from pdbus.kv.prefix import PageKey


def key(number: int) -> PageKey:
    return PageKey(bytes([number]) * 32, (number,), bytes([number % 2]) * 32)


@given(st.lists(st.tuples(st.sampled_from(["publish", "drop", "drop_root", "take"]), st.integers(0, 9)), max_size=60))
def test_the_changes_taken_add_up_to_the_table(steps: list[tuple[str, int]]) -> None:
    table, followed = PageTable(4), set()
    holds = []

    def take() -> None:
        changed = table.changes.take()
        assert changed is not None
        followed.update(one for one, present in changed.items() if present)
        followed.difference_update(one for one, present in changed.items() if not present)

    for what, number in steps:
        if what == "publish":
            hold = table.hold()
            try:
                (page,) = hold.allocate(1)
            except Overloaded:
                holds.pop(0).release()
                continue
            table.publish(page, key(number))
            holds.append(hold)
            if number % 3 == 0:
                holds.pop().release()  # cached, and reclaimed later
        elif what == "drop":
            table.drop([key(number).digest])
        elif what == "drop_root":
            table.drop_root(key(number).kv_root)
        else:
            take()
    take()
    assert followed == set(table.keys)
    assert table.changes.take() == {}


def test_news_come_once_until_somebody_looks() -> None:
    noted, told = Changes(), []
    noted.on_news = lambda: told.append(1)
    for number in range(5):
        noted.note(bytes([number]), True)
    assert len(told) == 1
    noted.note(bytes(1), False)
    assert noted.take() == {bytes([number]): bool(number) for number in range(5)}
    noted.note(b"x", True)
    assert len(told) == 2


def test_what_is_not_taken_takes_no_memory_without_end_and_is_known_to_be_lost() -> None:
    noted = Changes()
    for number in range(changes.MOST_CHANGES + 1):
        noted.note(number.to_bytes(8, "big"), True)
    assert len(noted._noted) == changes.MOST_CHANGES
    assert noted.take() is None
    assert noted.take() == {}
    noted.note(b"x", True)
    assert noted.take() == {b"x": True}
