"""The index is what its worker told, in order, or it is known to be incomplete; never more than the bound."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdbus.messages.router import KvIndex, KvIndexSnapshot
from pdbus.router import kv_index
from pdbus.router.kv_index import KvTable
from pdbus.router.prefixes import PrefixKeys
from tests.support.cards import PAGE, keys

PROMPT = list(range(5 * PAGE + 3))
ALIVE = {"w": "i"}


def _cuts(prompt: Sequence[int] = PROMPT) -> list[bytes]:
    made = keys(list(prompt))
    return [made.cut(page) for page in range(len(made))]


def _matching(table: KvTable, prompt: Sequence[int] = PROMPT, worker: str = "w", incarnation: str = "i") -> int:
    return table.matching(keys(list(prompt)), {worker: incarnation}).get(worker, 0)


class Publisher:
    """A worker's side: its messages, and a snapshot after any of them."""

    def __init__(self, changes: Sequence[tuple[set[int], set[int], bool]]) -> None:
        have: set[bytes] = set()
        self.messages: list[KvIndex] = []
        self.states: list[set[bytes]] = [set()]
        for seq, (stored, evicted, clear) in enumerate(changes, 1):
            added, gone = ({b"%8d" % n for n in some} for some in (stored, evicted - stored))
            have = (added | (set() if clear else have)) - gone
            self.messages.append(KvIndex("w", "i", seq, tuple(added), tuple(gone), clear))
            self.states.append(have)

    def snapshot(self, seq: int) -> KvIndexSnapshot:
        return KvIndexSnapshot("i", seq, b"".join(self.states[seq]))


_NUMBERS = st.sets(st.integers(0, 20), max_size=6)
_PUBLISHERS = st.lists(st.tuples(_NUMBERS, _NUMBERS, st.booleans()), min_size=1, max_size=12).map(Publisher)


def _known(table: KvTable) -> set[bytes]:
    return table._workers["w"].keys


@given(_PUBLISHERS, st.data())
def test_whatever_gets_lost_and_comes_late_a_table_that_lacks_nothing_is_right(
    publisher: Publisher, data: st.DataObject
):
    table, last = KvTable(), 0
    order = data.draw(st.permutations(publisher.messages).map(lambda all: all[: data.draw(st.integers(1, len(all)))]))
    for message in order:
        last = max(last, message.seq)
        whole = table.apply(message)
        if not whole and data.draw(st.booleans()):
            whole = table.load("w", publisher.snapshot(data.draw(st.integers(0, len(publisher.messages)))))
        if whole:
            seq = table._workers["w"].seq
            assert _known(table) == publisher.states[seq]
    table.load("w", publisher.snapshot(len(publisher.messages)))
    assert _known(table) == publisher.states[-1]


@given(_PUBLISHERS)
def test_a_gap_is_told_and_a_snapshot_closes_it(publisher: Publisher):
    table = KvTable()
    *early, last = publisher.messages
    if early and not last.clear:
        assert not table.apply(last)
        assert table.load("w", publisher.snapshot(len(early))), "the last one was kept"
    else:
        assert table.apply(last)
    assert _known(table) == publisher.states[-1]


def test_matching_counts_pages_from_the_first_on():
    table, cuts = KvTable(), _cuts()
    table.apply(KvIndex("w", "i", 1, (cuts[0], cuts[1], cuts[3])))
    assert _matching(table) == 2
    assert _matching(table, PROMPT[: 2 * PAGE]) == 1, "the page with the last token is computed in any case"
    assert _matching(table, [*PROMPT[:PAGE], 999, *PROMPT[PAGE + 1 :]]) == 1
    assert _matching(table, [999, *PROMPT]) == 0
    table.apply(KvIndex("w", "i", 2, (cuts[2], cuts[4]), (cuts[1],)))
    assert _matching(table) == 1
    table.apply(KvIndex("w", "i", 3, (cuts[1],)))
    assert _matching(table) == 5


def test_each_worker_has_its_own():
    table, cuts = KvTable(), _cuts()
    for worker, have in (("a", 4), ("b", 2), ("c", 0)):
        table.apply(KvIndex(worker, "i", 1, tuple(cuts[:have])))
    assert table.matching(keys(PROMPT), dict.fromkeys("abcd", "i")) == {"a": 4, "b": 2}


def test_a_new_life_has_nothing_of_the_former():
    """LESSONS, first table, 15: no ghosts after a restart at the same address."""
    table, cuts = KvTable(), _cuts()
    table.apply(KvIndex("w", "i", 1, tuple(cuts)))
    assert _matching(table, incarnation="j") == 0, "its card told before its first message"
    assert table.apply(KvIndex("w", "j", 1, tuple(cuts[:1])))
    assert _matching(table, incarnation="j") == 1
    assert _matching(table, incarnation="i") == 0
    assert not table.apply(KvIndex("w", "k", 7, tuple(cuts)))


class Counting(PrefixKeys):
    most = -1

    def cut(self, page: int) -> bytes:
        self.most = max(self.most, page)
        return super().cut(page)


@pytest.mark.parametrize("known", range(5))
def test_no_more_keys_are_made_than_it_takes(known: int):
    table, prompt = KvTable(), Counting(PROMPT, b"f/c", PAGE, b"salt")
    table.apply(KvIndex("w", "i", 1, tuple(_cuts()[:known])))
    assert table.matching(prompt, ALIVE).get("w", 0) == known
    assert prompt.most == (known if known else -1)


def test_memory_is_bounded(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(kv_index, "MOST_KEYS", 100)
    monkeypatch.setattr(kv_index, "_MOST_HELD", 5)
    table = KvTable()
    for seq in range(1, 40):
        table.apply(KvIndex("w", "i", seq, tuple(b"%8d" % (seq * 10 + n) for n in range(10))))
    assert table.keys_of("w") == 100
    table.load("w", KvIndexSnapshot("i", 50, b"".join(b"%8d" % n for n in range(500))))
    assert table.keys_of("w") == 100
    for seq in range(60, 99):
        table.apply(KvIndex("w", "i", seq))
    assert len(table._workers["w"].held) == 5
    table.forget_all_but(["another"])
    assert table.keys_of("w") == 0


def test_a_snapshot_cut_short_is_no_key():
    table = KvTable()
    assert table.load("w", replace(KvIndexSnapshot("i", 1, b""), keys=b"12345678123"))
    assert table.keys_of("w") == 1
