"""Who begins with a checkpoint knows, for ever after, what a reader of the whole log knows of all that lives."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from hypothesis import given, settings
from hypothesis import strategies as st

from pdbus.bus.codec import decode, encode
from pdbus.messages.changelog import Abort, Checkpoint, Commit, Convert, Forget, LogEntry, Member, Ref, Sealed
from pdbus.weights.checkpointing import EVERY, checkpoint_of, is_due
from pdbus.weights.history import History
from pdbus.weights.log_state import LIVE_S

ROOTS = [bytes([number]) * 32 for number in range(6)]
LINES = ["stable", "canary", ""]
S = 1_000_000_000


def entries() -> st.SearchStrategy[LogEntry]:
    roots, txs = st.sampled_from(ROOTS), st.sampled_from([f"tx-{number}" for number in range(12)])
    seals = st.none() | st.builds(Sealed, st.sampled_from("ab"), st.just("born"), st.integers(0, 9), st.integers(0, 9))
    commits = st.builds(
        lambda tx, root, parent, line, sealed, source: Commit(
            tx, root, parent, "me", "", (), "int8" if source else "fp32", line, sealed, source
        ),
        txs, roots, st.none() | roots, st.sampled_from(LINES), seals, st.none() | st.none() | roots,
    )  # fmt: skip
    shares = st.none() | st.floats(0, 1)
    refs = st.builds(
        lambda name, root, share, now: Ref(name, root, "me", share=share, now=now),
        st.sampled_from(LINES[:2]), st.none() | roots, shares, st.booleans(),
    )  # fmt: skip
    members = st.builds(Member, st.sampled_from(["p", "q"]), st.sampled_from(["join", "leave"]))
    lines = st.sampled_from(LINES)
    converts = st.builds(
        lambda ref, root, line: Convert("int8", ref, "me", root, "" if root else line),
        lines, st.none() | roots, lines,
    )  # fmt: skip
    return st.one_of(
        st.builds(LogEntry, commit=commits),
        st.builds(LogEntry, commit=commits),
        st.builds(LogEntry, ref=refs),
        st.builds(LogEntry, abort=st.builds(Abort, txs, st.just("late"))),
        st.builds(LogEntry, member=members),
        st.builds(LogEntry, convert=converts),
        st.builds(LogEntry, forget=st.builds(Forget, st.lists(roots, max_size=3).map(tuple), st.just("me"))),
    )


def folded(log: Sequence[tuple[float, LogEntry]], history: History | None = None) -> History:
    history = history or History()
    for gap_s, entry in log:
        history.apply(history.seq + 1, history.time_ns + int(gap_s * S), entry)
    return history


def known(history: History) -> object:
    """All of it, except of what is dead."""
    live = history.retained(history.time_ns, LIVE_S)
    versions = {root: history.roots[root] for root in live}
    places = (history.seq, history.time_ns, history.entries, history.forgotten)
    names = (history.refs, history.heads, history.shares, history.pending, history.wanted, history.members)
    made = {root: history.derived(root, "int8") for root in live}
    sources = {root: history.conversions.sources.get(root) for root in live}
    return places, names, versions, history.ended, history.sealed, made, sources, history.due_conversions


GAPS = st.sampled_from([0.1, 30.0, 500.0, LIVE_S / 2, LIVE_S + 1, 24 * 3600.0])


@settings(max_examples=60)
@given(st.lists(st.tuples(GAPS, entries()), max_size=40), st.data())
def test_from_a_checkpoint_on_everything_that_lives_is_as_from_the_start(
    log: list[tuple[float, LogEntry]], data: st.DataObject
) -> None:
    cut = data.draw(st.integers(0, len(log)))
    checkpoint = decode(Checkpoint, encode(checkpoint_of(folded(log[:cut]), "born")))
    late = History.restored(checkpoint)
    assert known(late) == known(folded(log[:cut]))
    folded(log[cut:], late)
    full = folded(log)
    assert known(late) == known(full)
    mine = data.draw(entries().filter(lambda entry: entry.commit is not None)).commit
    assert mine
    assert late.outcome(mine) == full.outcome(mine)
    assert checkpoint_of(late, "born") == replace(
        checkpoint_of(full, "born"), versions=checkpoint_of(late, "born").versions
    )


def versions(count: int, step_s: float) -> History:
    log = [
        (
            step_s,
            LogEntry(
                commit=Commit(f"tx-{i}", i.to_bytes(32, "big"), None, "me", "m" * 40, (("layers.0", ROOTS[0]),) * 4)
            ),
        )
        for i in range(count)
    ]
    return folded(log)


def test_a_checkpoint_fits_a_message_and_leaves_out_the_oldest_dead_first() -> None:
    history = versions(12_000, 2.0)
    checkpoint = checkpoint_of(history, "born")
    assert len(encode(checkpoint)) < 900_000
    assert {version.root for version in checkpoint.versions} >= set(history.retained(history.time_ns, LIVE_S))
    assert checkpoint.versions[-1].commit
    assert checkpoint.versions[0].commit is None
    roots = list(history.roots)
    assert [version.root for version in checkpoint.versions] == roots[len(roots) - len(checkpoint.versions) :]


def test_one_is_due_after_so_many_entries_and_one_of_a_lost_log_does_not_count() -> None:
    history = versions(EVERY, 1.0)
    last = checkpoint_of(history, "born")
    assert is_due(history, None, "born")
    assert not is_due(history, last, "born")
    assert is_due(history, last, "reborn")
    assert not is_due(versions(EVERY - 1, 1.0), None, "born")


def test_names_of_versions_that_a_checkpoint_does_not_have_mean_nothing() -> None:
    """As such a ref in the log: else every reader would fail at the next entry."""
    made = checkpoint_of(History(), "born")
    history = History.restored(replace(made, refs=(("stable", ROOTS[0]),), heads=(("canary", ROOTS[1]),)))
    history.apply(1, S, LogEntry(ref=Ref("stable", None, "me")))
    assert not history.refs
    assert not history.heads
    assert not history.wanted
