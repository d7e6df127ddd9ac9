from __future__ import annotations

import pytest

from pdbus.errors import InvalidRequest, NotFound
from pdbus.messages.changelog import Abort, Commit, Forget, LogEntry, Member, Ref, Sealed
from pdbus.weights.history import History
from pdbus.weights.log_state import LIVE_S, Moment

A, B, C = bytes([0xAA]) * 32, bytes([0xBB]) * 32, bytes([0xCC]) * 32
S = 1_000_000_000


def commit(root: bytes, parent: bytes | None = None, tx: str | None = None, line: str = "stable") -> LogEntry:
    tx = tx or f"tx-{root.hex()[:2]}-{parent and parent.hex()[:2]}"
    return LogEntry(commit=Commit(tx, root, parent, "me", "", (), ref=line))


def ref(name: str, root: bytes | None, share: float | None = None) -> LogEntry:
    return LogEntry(ref=Ref(name, root, "me", share=share))


def folded(*entries: LogEntry) -> History:
    """Entry i has sequence i + 1 and was appended at second i + 1."""
    history = History()
    for index, entry in enumerate(entries, 1):
        history.apply(index, index * S, entry)
    return history


def test_a_commit_makes_a_root_exist_and_wanted_before_any_ref_names_it() -> None:
    history = folded(commit(A))
    assert (history.head("stable"), history.pending, history.wanted) == (A, {"stable": A}, (A,))
    assert history.roots[A].at == Moment(1, S)
    assert history.refs == {}


def test_a_ref_names_a_root_and_is_resolved_like_its_first_digits() -> None:
    history = folded(commit(A), ref("stable", A))
    assert history.resolve("stable") == history.resolve("aaaaaa") == history.resolve(A.hex()) == A
    assert history.pending == {}
    for unknown in ("canary", "aaaaa", "bbbbbb", "AAAAAA", ""):
        with pytest.raises(NotFound):
            history.resolve(unknown)


def test_an_ambiguous_prefix_is_refused() -> None:
    history = folded(commit(A), commit(A[:16] + B[:16], A))
    with pytest.raises(InvalidRequest, match="2 versions"):
        history.resolve("aaaaaa")


def test_a_root_leaves_when_its_last_ref_moves_on_and_returns_by_a_rollback() -> None:
    entries = [commit(A), ref("stable", A), ref("canary", A), commit(B, A), ref("stable", B), ref("canary", B)]
    assert folded(*entries[:5]).roots[A].left is None
    moved = folded(*entries)
    assert moved.roots[A].left == Moment(6, 6 * S)
    assert moved.wanted == (B,)
    back = folded(*entries, ref("stable", A))
    assert back.roots[A].left is None
    assert back.wanted == (B, A)


def test_after_a_rollback_the_last_commit_is_no_longer_wanted_nor_the_head() -> None:
    history = folded(commit(A), ref("stable", A), commit(B, A), ref("stable", B), ref("stable", A))
    assert history.head("stable") == A
    assert history.wanted == (A,)
    assert history.roots[B].left == Moment(5, 5 * S)


def test_a_commit_that_never_got_a_ref_leaves_with_the_next_one() -> None:
    history = folded(commit(A), ref("stable", A), commit(B, A), commit(C, B))
    assert history.wanted == (A, C)
    assert history.roots[B].left == Moment(4, 4 * S)


def test_a_root_committed_again_is_the_head_and_keeps_its_lineage() -> None:
    history = folded(commit(A), ref("stable", A), commit(B, A), ref("stable", B), commit(A, B))
    assert (history.head("stable"), history.pending, history.wanted) == (A, {"stable": A}, (B, A))
    assert history.roots[A].at.seq == 1
    assert history.roots[A].left is None


def test_a_removed_ref_names_nothing() -> None:
    history = folded(commit(A), ref("stable", A), ref("stable", None), ref("stable", None))
    assert history.refs == {}
    assert history.roots[A].left == Moment(3, 3 * S)


def test_a_ref_to_a_root_without_commit_is_ignored() -> None:
    assert folded(commit(A), ref("stable", A), ref("stable", B)).refs == {"stable": A}


def test_retained_roots_are_the_wanted_ones_and_those_that_left_lately() -> None:
    history = folded(commit(A), ref("stable", A), commit(B, A), ref("stable", B))
    assert history.retained(14 * S, 10.0) == (A, B)
    assert history.retained(14 * S + 1, 10.0) == (B,)


def test_what_a_failed_compare_means() -> None:
    mine = Commit("mine", B, A, "me", "", ())
    assert folded(commit(A), ref("stable", A)).outcome(mine) == "open"
    assert folded(commit(A), LogEntry(commit=mine)).outcome(mine) == "committed"
    assert folded(commit(A), LogEntry(abort=Abort("mine", "late"))).outcome(mine) == "aborted"
    assert folded(commit(A), commit(C, A)).outcome(mine) == "conflict"
    assert folded(commit(A), LogEntry(commit=mine), commit(C, B)).outcome(mine) == "committed"


def test_nothing_is_made_of_a_version_that_was_given_up_meanwhile() -> None:
    """Some of its blocks would be in the new one."""
    made = Commit("mine", C, None, "me", "", (), "int8", "stable-int8", source=A)
    alone = Commit("mine", C, A, "me", "", (), "int8", "", source=A)
    entries = [commit(A), commit(B, A)]
    assert [folded(*entries).outcome(one) for one in (made, alone)] == ["open", "open"]
    entries.append(LogEntry(forget=Forget((A,), "me")))
    assert [folded(*entries).outcome(one) for one in (made, alone)] == ["conflict", "conflict"]


def test_a_commit_after_its_abort_is_void_and_an_abort_after_its_commit_too() -> None:
    assert folded(LogEntry(abort=Abort("t", "late")), commit(A, tx="t")).roots == {}
    history = folded(commit(A, tx="t"), LogEntry(abort=Abort("t", "late")))
    assert list(history.roots) == [A]
    assert history.outcome(Commit("t", A, None, "me", "", ())) == "committed"


def test_a_commit_repeated_under_its_transaction_counts_once() -> None:
    history = folded(commit(A, tx="t"), commit(B, A), commit(A, tx="t"))
    assert history.head("stable") == B


def test_lines_go_on_apart_and_only_a_commit_or_move_on_the_same_line_is_a_conflict() -> None:
    log = [commit(A), ref("stable", A), ref("canary", A), commit(B, A, line="canary")]
    assert folded(*log).pending == {"canary": B}
    assert folded(*log).head("stable") == A
    mine = Commit("mine", C, A, "me", "", ())
    assert folded(*log).outcome(mine) == "open"
    assert folded(*log, ref("stable", B)).outcome(mine) == "conflict"
    assert folded(*log).outcome(Commit("mine", C, A, "me", "", (), ref="canary")) == "conflict"


def test_a_commit_without_a_line_exists_and_is_not_wanted() -> None:
    history = folded(commit(A), ref("stable", A), commit(B, A, line=""))
    assert history.wanted == (A,)
    assert history.roots[B].left == Moment(3, 3 * S)
    assert folded(commit(A), commit(C, A)).outcome(Commit("x", B, A, "me", "", (), ref="")) == "open"


def test_a_removed_ref_takes_its_line_with_it() -> None:
    history = folded(commit(A), ref("stable", A), ref("canary", A), commit(B, A, line="canary"), ref("canary", None))
    assert (history.refs, history.head("canary"), history.wanted) == ({"stable": A}, None, (A,))


def test_a_forgotten_root_is_gone_unless_it_is_wanted() -> None:
    log = [commit(A), ref("stable", A), commit(B, A), ref("stable", B), commit(C, B)]
    history = folded(*log, LogEntry(forget=Forget((A, B, C), "me")))
    assert list(history.roots) == [B, C]
    with pytest.raises(NotFound):
        history.resolve("aaaaaa")
    assert folded(*log, LogEntry(forget=Forget((A,), "me")), ref("stable", A)).refs == {"stable": B}


def test_a_ref_that_is_to_move_when_workers_are_ready_waits_as_its_lines_head() -> None:
    log = [commit(A), ref("stable", A), commit(B, A), ref("stable", B)]
    history = folded(*log, LogEntry(ref=Ref("stable", A, "me", now=False)))
    assert (history.refs, history.pending, history.wanted) == ({"stable": B}, {"stable": A}, (B, A))
    assert folded(*log, LogEntry(ref=Ref("canary", A, "me", share=0.5, now=False))).shares == {"canary": 0.5}


def test_the_last_move_of_a_ref_says_its_share() -> None:
    log = [commit(A), ref("stable", A), ref("canary", A, 0.1)]
    assert folded(*log).shares == {"canary": 0.1}
    assert folded(*log, ref("canary", A)).shares == {}
    assert folded(*log, ref("canary", None)).shares == {}


def test_members_join_and_leave_and_repeat_themselves_without_harm() -> None:
    steps = [("b", "join"), ("a", "join"), ("b", "join"), ("c", "leave"), ("b", "leave")]
    entries = [LogEntry(member=Member(server, action)) for server, action in steps]  # type: ignore[arg-type]
    assert folded(*entries[:4]).members == ("a", "b")
    assert folded(*entries).members == ("a",)


def test_what_left_longer_ago_than_any_update_may_rest_on_it_does_not_come_back() -> None:
    history = folded(commit(A), ref("stable", A), commit(B, A), ref("stable", B))
    assert history.roots[A].left == Moment(4, 4 * S)
    history.apply(5, 4 * S + int(LIVE_S * S) + 1, ref("stable", A))
    assert history.refs == {"stable": B}
    history.apply(6, 5 * S + int(LIVE_S * S), commit(A, B, tx="again"))
    assert history.roots[A].at.seq == 6


def test_two_seals_of_one_stretch_of_a_branch_conflict_also_on_different_lines() -> None:
    def sealing(root: bytes, after: int, upto: int, line: str) -> Commit:
        return Commit(f"tx-{line}", root, A, "me", "", (), ref=line, sealed=Sealed("b", "today", after, upto))

    log = [commit(A), ref("stable", A), ref("canary", A)]
    one, other = sealing(B, 0, 7, "stable"), sealing(C, 0, 9, "canary")
    assert folded(*log).outcome(other) == "open"
    history = folded(*log, LogEntry(commit=one))
    assert history.outcome(other) == "conflict"
    assert history.sealed_upto("b", "today") == 7
    assert history.sealed_upto("b", "tomorrow") == history.sealed_upto("c", "today") == 0
    assert history.outcome(sealing(C, 7, 9, "canary")) == "open"


def test_entries_must_come_in_order() -> None:
    history = folded(commit(A))
    with pytest.raises(ValueError, match="after"):
        history.apply(1, S, commit(B, A))


def test_an_entry_of_an_unknown_kind_only_counts() -> None:
    assert folded(LogEntry()).seq == 1
