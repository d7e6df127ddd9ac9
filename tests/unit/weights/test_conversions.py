from __future__ import annotations

from pdbus.messages.changelog import Commit, Convert, Forget, LogEntry, Ref
from pdbus.weights.checkpointing import checkpoint_of
from pdbus.weights.conversions import Due
from pdbus.weights.history import History

A, B, A8, B8 = (letter * 32 for letter in (b"A", b"B", b"a", b"b"))
FOLLOW = LogEntry(convert=Convert("int8", "stable-int8", "me", line="stable"))


def commit(root: bytes, line: str = "stable", source: bytes | None = None) -> LogEntry:
    return LogEntry(
        commit=Commit(f"{root!r}{line}", root, None, "me", "", (), "int8" if source else "fp32", line, source=source)
    )


def folded(*entries: LogEntry) -> History:
    history = History()
    for seq, entry in enumerate(entries, 1):
        history.apply(seq, seq, entry)
    return history


def test_each_head_of_a_line_that_is_followed_is_due_until_its_version_is_there() -> None:
    history = folded(commit(A), FOLLOW)
    assert history.due_conversions == (Due(A, "int8", "stable-int8"),)
    history.apply(10, 10, commit(A8, "stable-int8", A))
    assert history.due_conversions == ()
    assert history.derived(A, "int8") == A8
    assert history.pending["stable-int8"] == A8
    history.apply(11, 11, commit(B))
    assert history.due_conversions == (Due(B, "int8", "stable-int8"),)
    history.apply(12, 12, commit(B8, "stable-int8", B))
    history.apply(13, 13, LogEntry(ref=Ref("stable", A, "me", "rollback")))
    assert history.due_conversions == (Due(A, "int8", "stable-int8"),)
    history.apply(14, 14, LogEntry(ref=Ref("stable-int8", A8, "server", now=False)))
    assert history.due_conversions == ()


def test_a_ref_that_is_removed_is_followed_no_longer() -> None:
    history = folded(commit(A), FOLLOW, commit(A8, "stable-int8", A), LogEntry(ref=Ref("stable-int8", None, "me")))
    assert history.due_conversions == ()


def test_what_is_asked_for_once_is_made_once() -> None:
    history = folded(commit(A), LogEntry(convert=Convert("int8", "", "me", root=A)))
    assert history.due_conversions == (Due(A, "int8", ""),)
    history.apply(10, 10, commit(A8, "", A))
    assert history.due_conversions == ()
    history.apply(11, 11, LogEntry(convert=Convert("int8", "", "me", root=A)))
    assert history.due_conversions == ()
    history.apply(12, 12, LogEntry(convert=Convert("int8", "small", "me", root=A)))
    assert history.due_conversions == (Due(A, "int8", "small"),)
    history.apply(13, 13, LogEntry(ref=Ref("small", A8, "server", now=False)))
    history.apply(14, 14, commit(B))
    assert history.due_conversions == ()


def test_of_what_is_gone_nothing_is_made_and_what_was_made_of_it_may_be_gone_itself() -> None:
    history = folded(commit(A), commit(B), LogEntry(convert=Convert("fp16", "", "me", root=A)), commit(A8, "", A))
    history.apply(10, 10, LogEntry(forget=Forget((A, A8), "me")))
    assert history.due_conversions == ()
    assert history.derived(A, "int8") is None


def test_a_late_joiner_learns_both_from_a_checkpoint() -> None:
    asked = LogEntry(convert=Convert("fp16", "", "me", root=A))
    early = folded(commit(A), commit(A8, "", A), FOLLOW, asked)
    history = History.restored(checkpoint_of(early, "born"))
    assert history.derived(A, "int8") == A8
    assert history.conversions.sources == {A8: (A, "int8")}
    assert history.due_conversions == early.due_conversions == (Due(A, "fp16", ""), Due(A, "int8", "stable-int8"))
