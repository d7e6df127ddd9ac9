"""Who wants a version in int8 that servers are making waits for it: as long as that makes sense."""

from __future__ import annotations

from dataclasses import replace

import pytest

from pdbus.messages.changelog import Commit, Convert, LogEntry, Ref
from pdbus.weights.coming import Coming
from pdbus.weights.history import History

A, B, C, D, A8, B8, C8, D8 = (bytes([letter]) * 32 for letter in b"ABCDabcd")
MB = 1_000_000


def put(history: History, *entries: LogEntry) -> None:
    for entry in entries:
        history.apply(history.seq + 1, (history.seq + 1) * 1_000_000_000, entry)


def commit(root: bytes, parent: bytes | None) -> LogEntry:
    return LogEntry(commit=Commit(root.hex(), root, parent, "me", "", ()))


def made(root: bytes, source: bytes, parent: bytes | None) -> LogEntry:
    entry = commit(root, parent).commit
    assert entry
    return LogEntry(commit=replace(entry, ref="stable-int8", precision="int8", source=source))


def moved(name: str, root: bytes | None) -> LogEntry:
    return LogEntry(ref=Ref(name, root, "me"))


@pytest.fixture
def history() -> History:
    """Of a line that is followed, whose new head is not made in int8 yet."""
    history = History()
    followed = LogEntry(convert=Convert("int8", "stable-int8", "me", line="stable"))
    put(history, commit(A, None), moved("stable", A), followed, made(A8, A, None), moved("stable-int8", A8))
    put(history, commit(B, A))
    return history


def test_it_is_waited_for_until_it_is_made(history: History) -> None:
    coming = Coming("int8")
    assert coming.is_worth_it(history, B, 100 * MB, 0.0)
    put(history, LogEntry(commit=Commit("other", C, None, "me", "", (), ref="side")))
    assert coming.is_worth_it(history, B, 100 * MB, 1.0)
    put(history, made(B8, B, A8), moved("stable-int8", B8))
    assert not coming.is_worth_it(history, B, 100 * MB, 2.0)
    put(history, commit(D, B))
    assert coming.is_worth_it(history, D, 100 * MB, 3.0), "it came in time"


def test_nothing_that_nobody_is_to_make_nor_what_is_not_wanted(history: History) -> None:
    put(history, moved("stable-int8", None))
    assert not Coming("int8").is_worth_it(history, B, MB, 0.0)
    assert not Coming("int8").is_worth_it(history, A, MB, 0.0)
    assert not Coming("fp16").is_worth_it(history, B, MB, 0.0)


def test_no_longer_than_it_may_take_to_make_it(history: History) -> None:
    coming = Coming("int8")
    assert coming.is_worth_it(history, B, 100 * MB, 0.0)
    assert coming.is_worth_it(history, B, 100 * MB, 8.9)
    assert not coming.is_worth_it(history, B, 100 * MB, 9.1)
    assert not coming.is_worth_it(history, B, 100 * MB, 9.2), "nor again"
    assert Coming("int8").is_worth_it(history, B, 1 << 50, 0.0)


def test_after_a_wait_in_vain_none_is_waited_for_until_versions_are_made_again(history: History) -> None:
    """Commits may come faster than they are converted: the newest has to be loaded all the same."""
    coming = Coming("int8")
    assert coming.is_worth_it(history, B, MB, 0.0)
    put(history, commit(C, B))
    assert not coming.is_worth_it(history, C, MB, 1.0)
    assert not coming.is_worth_it(history, C, MB, 2.0)
    put(history, made(C8, C, A8), moved("stable-int8", C8), commit(D, C))
    assert coming.is_worth_it(history, D, MB, 3.0)
    put(history, made(D8, D, C8))
    assert not coming.is_worth_it(history, D, MB, 4.0)
