"""When an engine's thread is taken to hang: told by what its steps took before, never because a machine is slow."""

from __future__ import annotations

import pytest

from pdbus.engine.progress import FIRST_USE_S, FLOOR_S, LOOK_S, Progress, Standstill, Verdict


class Clock:
    """A thread and its watch, looking every `LOOK_S`."""

    def __init__(self) -> None:
        self.now_s = 100.0
        self.progress, self.standstill = Progress(), Standstill()

    def step(self, taken_s: float, kind: str = "step", size: int = 1, uses: tuple[str, ...] = ()) -> list[Verdict]:
        """One that is looked at all the time."""
        self.progress.begin(kind, self.now_s, size=size, uses=uses)
        verdicts = self.stands(taken_s)
        self.progress.made(self.now_s)
        return verdicts

    def stands(self, seconds: float) -> list[Verdict]:
        """What the looks say meanwhile."""
        verdicts: list[Verdict] = []
        until_s = self.now_s + seconds
        while self.now_s + LOOK_S <= until_s:
            self.now_s += LOOK_S
            verdicts.append(self.standstill.look(self.progress, self.now_s))
        self.now_s = until_s
        return verdicts


def test_a_quick_thread_that_stands_still_is_hung_within_two_seconds_and_well_again_once_it_goes_on() -> None:
    clock = Clock()
    for _ in range(50):
        clock.step(0.02)
    clock.progress.begin("step", clock.now_s)
    assert clock.stands(2.0)[-1] == "hung"
    assert clock.stands(2.0)[-1] == "hung", "there is still hope"
    clock.progress.made(clock.now_s)
    assert clock.stands(LOOK_S) == ["well"]


def test_one_that_never_goes_on_is_given_up() -> None:
    clock = Clock()
    clock.step(0.02)
    clock.progress.begin("step", clock.now_s)
    verdicts = clock.stands(30.0)
    assert sorted(set(verdicts), key=verdicts.index) == ["well", "hung", "given up"]
    assert verdicts.index("given up") * LOOK_S > 3 * FLOOR_S


def test_steps_may_always_take_some_times_what_they_took_lately() -> None:
    clock = Clock()
    for _ in range(5):
        clock.step(1.0)
    for _ in range(20):
        clock.step(0.1)
    assert set(clock.step(5.0)) == {"well"}


def test_what_was_slow_long_ago_does_not_count_for_ever() -> None:
    clock = Clock()
    clock.step(5.0)
    for _ in range(1000):
        clock.step(0.01)
    assert clock.progress.limit_s == FLOOR_S


def test_kinds_are_measured_apart_and_a_larger_step_may_take_longer() -> None:
    """A chunk of a long prompt after many single tokens and short prompts."""
    clock = Clock()
    clock.step(0.5, "layer", 16)
    for _ in range(1000):
        clock.step(0.01)
    assert set(clock.step(8.0, "layer", 512)) == {"well"}


def test_first_uses_of_a_version_take_long_and_say_nothing_of_later_ones() -> None:
    clock = Clock()
    for _ in range(4):
        assert set(clock.step(FIRST_USE_S / 2, uses=("a",))) == {"well"}
    clock.step(0.01, uses=("a",))
    assert clock.progress.limit_s == FLOOR_S
    clock.progress.begin("step", clock.now_s, uses=("a", "b"))
    assert clock.stands(FIRST_USE_S + 1.0)[-1] == "hung"


def test_a_process_that_was_stopped_or_starved_does_not_take_its_thread_for_hung() -> None:
    """Neither had the thread a core to run on."""
    clock = Clock()
    clock.step(0.02)
    clock.progress.begin("step", clock.now_s)
    for late_s in (10.0, 600.0):
        clock.now_s += late_s
        assert clock.standstill.look(clock.progress, clock.now_s) == "well"


@pytest.mark.parametrize("before", [False, True])
def test_waiting_is_no_hanging(before: bool) -> None:
    """For work, or for what comes or is given up by itself."""
    clock = Clock()
    if before:
        clock.step(0.02)
    clock.progress.waits = True
    assert set(clock.stands(100.0)) == {"well"}


def test_the_first_token_of_a_version_may_take_long_after_any_number_of_chunks() -> None:
    """Of which the first were slow, too: what runs for a single row is another matter."""
    clock = Clock()
    for _ in range(10):
        clock.step(0.01, "layer", 512, ("a",))
    assert set(clock.step(FIRST_USE_S / 2, uses=("a",))) == {"well"}


def test_what_was_waited_for_says_nothing_of_how_long_steps_take() -> None:
    clock = Clock()
    clock.step(0.02, "layer")
    clock.progress.begin("layer", clock.now_s)
    clock.progress.waits = True
    assert set(clock.stands(5.0)) == {"well"}
    clock.progress.goes_on(clock.now_s)
    clock.progress.made(clock.now_s)
    assert clock.progress.limit_s == FLOOR_S
