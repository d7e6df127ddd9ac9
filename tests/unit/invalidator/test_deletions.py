"""What is to be deleted follows from the two logs alone."""

from __future__ import annotations

from itertools import count

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from pdbus.invalidator.deletions import HORIZON_S, NS, Deletions
from pdbus.messages.changelog import Commit, Forget, LogEntry, Ref
from pdbus.messages.invalidator import DueDelete
from pdbus.messages.workers import Invalidated
from pdbus.weights.history import History

R1, R2 = b"\x01" * 32, b"\x02" * 32
WINDOW_S, LONGEST_S = 600.0, 300.0


class Logs:
    """Both logs, as they are appended to."""

    def __init__(self) -> None:
        self.now_ns = 1_000_000 * NS
        self.history, self.deletions = History(), Deletions("m")
        self.seq = 0
        for root in (R1, R2):
            self.change(LogEntry(commit=Commit(f"tx {root[0]}", root, None, "a", "", ())))

    def change(self, entry: LogEntry) -> int:
        self.history.apply(self.history.seq + 1, self.now_ns, entry)
        return self.history.seq

    def point(self, root: bytes | None, name: str = "stable") -> int:
        return self.change(LogEntry(ref=Ref(name, root, "a")))

    def delete(self, step: DueDelete) -> None:
        self.log(Invalidated("m", "delete", root=step.root, second=step.second, cause=step.cause))

    def log(self, entry: Invalidated) -> int:
        self.seq += 1
        self.deletions.apply(self.seq, self.now_ns, entry)
        return self.seq

    def pending(self) -> list[DueDelete]:
        return self.deletions.pending(self.history, WINDOW_S, LONGEST_S, self.now_ns)


def test_a_root_that_left_is_deleted_after_the_window_and_again_after_the_longest_deadline() -> None:
    logs = Logs()
    logs.point(R1)
    left_ns, cause = logs.now_ns, logs.point(R2)
    first = DueDelete("m", R1, left_ns + int(WINDOW_S * NS), second=False, cause=cause)
    assert logs.pending() == [first]
    assert logs.deletions.still_wanted(first, logs.history)
    logs.now_ns = first.due_ns
    logs.delete(first)
    second = DueDelete("m", R1, first.due_ns + int(LONGEST_S * NS), second=True, cause=cause)
    assert logs.pending() == [second]
    assert logs.deletions.still_wanted(first, logs.history), "until it is settled, for it reminds of the second"
    logs.delete(second)
    assert logs.pending() == []
    assert not logs.deletions.still_wanted(first, logs.history)
    assert not logs.deletions.still_wanted(second, logs.history)


def test_a_root_that_another_ref_names_stays() -> None:
    logs = Logs()
    logs.point(R1)
    logs.point(R1, "canary")
    logs.point(R2)
    assert logs.pending() == []
    logs.point(None, "canary")
    assert [step.root for step in logs.pending()] == [R1]


def test_a_rollback_within_the_window_drops_the_delete() -> None:
    logs = Logs()
    logs.point(R1)
    logs.point(R2)
    [first] = logs.pending()
    logs.point(R1)
    assert [step.root for step in logs.pending()] == [R2]
    assert not logs.deletions.still_wanted(first, logs.history)
    assert list(logs.deletions.wrongly_buried(logs.history)) == []


def test_a_rollback_after_the_first_delete_restores_the_root_and_drops_the_second() -> None:
    logs = Logs()
    logs.point(R1)
    logs.point(R2)
    [first] = logs.pending()
    logs.delete(first)
    [second] = logs.pending()
    logs.point(R1)
    assert list(logs.deletions.wrongly_buried(logs.history)) == [(R1, 1)]
    logs.log(Invalidated("m", "restore", root=R1, cause=1))
    assert list(logs.deletions.wrongly_buried(logs.history)) == []
    assert not logs.deletions.still_wanted(second, logs.history)


def test_a_root_that_leaves_again_is_deleted_again() -> None:
    logs = Logs()
    for _ in range(2):
        logs.point(R1)
        logs.point(R2)
        [first] = [step for step in logs.pending() if step.root == R1]
        assert not first.second
        logs.delete(first)
        [second] = [step for step in logs.pending() if step.root == R1]
        assert second.second
        logs.delete(second)


def test_another_models_delete_of_a_root_that_is_live_here_is_undone() -> None:
    logs = Logs()
    logs.point(R1)
    seq = logs.log(Invalidated("other", "delete", root=R1, cause=9))
    assert list(logs.deletions.wrongly_buried(logs.history)) == [(R1, seq)]
    logs.point(R2)
    [step] = logs.pending()
    assert not step.second, "it was not this model's delete"


def test_what_is_forgotten_is_deleted_at_once_and_again() -> None:
    logs = Logs()
    logs.point(R1)
    logs.point(R2)
    cause = logs.change(LogEntry(forget=Forget((R1,), "a")))
    [first] = logs.pending()
    assert (first.root, first.due_ns, first.cause, first.second) == (R1, logs.now_ns, cause, False)
    assert logs.deletions.still_wanted(first, logs.history)
    logs.delete(first)
    [second] = logs.pending()
    assert second.second
    assert logs.deletions.still_wanted(second, logs.history)
    logs.delete(second)
    assert logs.pending() == []


def test_what_is_committed_again_after_it_was_forgotten_is_let_in_again() -> None:
    logs = Logs()
    logs.point(R1)
    logs.point(R2)
    logs.change(LogEntry(forget=Forget((R1,), "a")))
    [first] = logs.pending()
    logs.delete(first)
    logs.change(LogEntry(commit=Commit("tx again", R1, R2, "a", "", (), ref="stable")))
    assert [root for root, _ in logs.deletions.wrongly_buried(logs.history)] == [R1]
    assert not any(step.root == R1 for step in logs.pending())


def test_what_left_long_ago_needs_no_reminder() -> None:
    logs = Logs()
    logs.point(R1)
    logs.point(R2)
    logs.now_ns += int((WINDOW_S + HORIZON_S) * NS)
    assert logs.pending() == []


class AnyOrder(RuleBasedStateMachine):
    """Reminders come late, twice and out of order, refs move in between: in the end no dead root is live in a cache,
    and no live one is shut out."""

    def __init__(self) -> None:
        super().__init__()
        self.logs = Logs()
        self.reminders: list[DueDelete] = []
        self.names = count()

    @rule(root=st.sampled_from([R1, R2, None]), name=st.sampled_from(["stable", "canary"]))
    def move(self, root: bytes | None, name: str) -> None:
        self.logs.point(root, name)

    @rule(passes=st.sampled_from([1.0, LONGEST_S, WINDOW_S]))
    def time(self, passes: float) -> None:
        self.logs.now_ns += int(passes * NS)

    @rule()
    def remind(self) -> None:
        self.reminders += self.logs.pending()

    @rule(chosen=st.integers(0, 50))
    def work(self, chosen: int) -> None:
        if not self.reminders:
            return
        reminder = self.reminders[chosen % len(self.reminders)]  # it stays: it may come again
        if reminder.due_ns <= self.logs.now_ns and self.logs.deletions.still_wanted(reminder, self.logs.history):
            assert self.logs.history.roots[reminder.root].left is not None, "a live root was deleted"
            self.logs.delete(reminder)

    @rule()
    def restore(self) -> None:
        for root, seq in list(self.logs.deletions.wrongly_buried(self.logs.history)):
            self.logs.log(Invalidated("m", "restore", root=root, cause=seq))

    @invariant()
    def it_settles(self) -> None:
        """From any state on, working off what is pending leads to rest."""
        deletions = Deletions("m")
        deletions._deleted = dict(self.logs.deletions._deleted)
        deletions._buried = dict(self.logs.deletions._buried)
        history, now_ns = self.logs.history, self.logs.now_ns
        for seq in range(10_000, 10_006):
            for root, _ in list(deletions.wrongly_buried(history)):
                deletions.apply(seq, now_ns, Invalidated("m", "restore", root=root))
            for step in deletions.pending(history, WINDOW_S, LONGEST_S, now_ns):
                now_ns = max(now_ns, step.due_ns)
                deletions.apply(
                    seq, now_ns, Invalidated("m", "delete", root=step.root, second=step.second, cause=step.cause)
                )
        live = {root for root, version in history.roots.items() if version.left is None}
        assert deletions.pending(history, WINDOW_S, LONGEST_S, now_ns) == []
        assert not live & deletions._buried.keys()


TestAnyOrder = AnyOrder.TestCase
TestAnyOrder.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)
