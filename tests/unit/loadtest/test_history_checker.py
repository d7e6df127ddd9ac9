"""Each guarantee has a history that breaks it, and is found broken there alone."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest

from loadtest.checker.history import verify
from loadtest.checker.records import GUARANTEES, Event, Verdict, read, upper_bound
from pdbus.recording import Recorder, recording

S = 1_000_000_000


class Story:
    """Events of a few processes, one every 100 ms."""

    def __init__(self) -> None:
        self._numbers: dict[str, Any] = {}
        self.events: list[Event] = []
        self.now_ns = 1000 * S

    def tell(self, process: str, event: str, **fields: Any) -> Story:
        number = next(self._numbers.setdefault(process, itertools.count(1)))
        self.now_ns += S // 10
        self.events.append(Event(process, number, self.now_ns, event, fields))
        return self

    def log(self, seq: int, process: str = "router", at: int | None = None, **fields: Any) -> Story:
        return self.tell(process, "log", seq=seq, at=at or self.now_ns, **fields)

    def verdict(self) -> Verdict:
        return verify(self.events)


def begun() -> Story:
    """Roots a and b are committed and loaded, stable names a."""
    story = Story()
    for process in ("router", "decode"):
        at = 1000 * S
        story.log(1, process, at, kind="commit", tx="1", root="a", ref="stable")
        story.log(2, process, at, kind="ref", ref="stable", root="a", now=True)
        story.log(4, process, at, kind="commit", tx="2", root="b", ref="stable")
    return story.tell("decode", "loaded", root="a", kv_root="ka").tell("decode", "loaded", root="b", kv_root="kb")


def answered(story: Story, root: str = "a", request: str = "r", **changed: str) -> Story:
    """One request's way; `changed`: the root of single events."""

    def at(event: str) -> str:
        return changed.get(event, root)

    session = f"{request}-0"
    story.tell("router", "admit", request=request, root=at("admit"), ref="stable")
    story.tell("prefill", "pin", session=session, attempt=1, root=at("pin"))
    story.tell("decode", "handoff", session=session, attempt=1, root=at("handoff"))
    for index in range(3):
        story.tell("router", "token", session=session, attempt=1, index=index, count=1, root=at("token"))
    story.tell("decode", "computed", session=session, attempt=1, root=at("computed"))
    return story.tell("router", "end", request=request, root=at("end"), tokens=3, whole=True)


def broken(story: Story) -> list[str]:
    return [violation.guarantee for violation in story.verdict().violations]


def test_a_sound_history_is_found_sound() -> None:
    story = answered(begun())
    story.log(5, kind="ref", ref="stable", root="b", now=True)
    answered(story, root="b", request="s")
    story.tell("cache", "put", kind="kv", key="k", made="b").tell(
        "cache", "get", kind="kv", key="k", made="b", root="b"
    )
    verdict = story.verdict()
    assert verdict.violations == []
    assert all(verdict.events[guarantee] for guarantee in GUARANTEES)


@pytest.mark.parametrize("event", ["pin", "handoff", "token", "computed", "end"])
def test_g1_every_step_speaks_of_one_root(event: str) -> None:
    assert set(broken(answered(begun(), **{event: "b"}))) == {"G1"}


def test_g1_a_cached_answer_of_another_root() -> None:
    story = begun().tell("router", "admit", request="r", root="a", ref="stable")
    assert set(broken(story.tell("router", "hit", request="r", root="a", made="b", key="k"))) == {"G1", "G4"}


def test_g2_a_root_is_used_before_its_commit() -> None:
    story = begun().tell("decode", "pin", session="r-0", attempt=1, root="c")
    assert broken(story) == ["G2"]
    story.now_ns += S
    assert broken(story.log(5, kind="commit", tx="3", root="c", ref="")) == ["G2"], "it came later"


def test_g2_an_aborted_commit_makes_no_root() -> None:
    story = begun().log(5, kind="abort", tx="3").log(6, kind="commit", tx="3", root="c", ref="")
    assert broken(story.tell("decode", "pin", session="r-0", attempt=1, root="c")) == ["G2"]


@pytest.mark.parametrize(("after_s", "found"), [(4, []), (6, ["G3"])])
def test_g3_an_older_root_is_admitted_long_after_the_ref_moved(after_s: int, found: list[str]) -> None:
    story = begun().log(5, kind="ref", ref="stable", root="b", now=True)
    story.now_ns += after_s * S
    assert broken(story.tell("router", "admit", request="r", root="a", ref="stable")) == found


def test_g3_a_root_that_its_ref_never_named() -> None:
    assert broken(begun().tell("router", "admit", request="r", root="b", ref="stable")) == ["G3"]
    assert broken(begun().tell("router", "admit", request="r", root="b")) == [], "it was asked for by its root"


def test_g4_a_result_or_a_page_made_from_other_weights() -> None:
    story = begun().tell("cache", "get", kind="result", key="k", made="a", root="b")
    assert broken(story) == ["G4"]
    story = begun().tell("cache", "put", kind="kv", key="k", made="a", generation=0)
    assert broken(story.tell("cache", "get", kind="kv", key="k", made="b", root="b")) == ["G4"]


def test_g4_two_versions_with_the_same_kv_share_pages() -> None:
    story = begun().tell("decode", "loaded", root="b", kv_root="ka")
    story.tell("cache", "put", kind="kv", key="k", made="a", generation=0)
    assert broken(story.tell("cache", "get", kind="kv", key="k", made="b", root="b")) == []


@pytest.mark.parametrize("event", ["put", "get"])
def test_g5_nothing_of_a_deleted_root_is_taken_or_given(event: str) -> None:
    story = begun().tell("cache", "put", kind="result", key="k", made="a").tell("cache", "delete", root="a")
    assert broken(story.tell("cache", event, kind="result", key="k", made="a", root="a")) == ["G5"]
    assert broken(begun().tell("cache", event, kind="result", key="k", made="a", root="a")) == []


def test_g5_a_rollback_lets_a_root_in_again() -> None:
    story = begun().tell("cache", "delete", root="a").tell("cache", "restore", root="a")
    assert broken(story.tell("cache", "put", kind="result", key="k", made="a", root="a")) == []


def test_g5_a_named_entry_that_raced_the_delete_of_its_name() -> None:
    named = {"kind": "feature", "key": "k", "made": "s", "name": "user"}
    story = begun().tell("cache", "delete_name", name="user", generation=3)
    assert broken(story.tell("cache", "put", generation=2, **named)) == ["G5"]
    story = begun().tell("cache", "put", generation=2, **named).tell("cache", "delete_name", name="user", generation=3)
    assert broken(story.tell("cache", "get", root="s", **named)) == ["G5"]
    story = begun().tell("cache", "delete_name", name="user", generation=3)
    assert broken(story.tell("cache", "put", generation=3, **named).tell("cache", "get", root="s", **named)) == []


def test_g6_an_entry_of_the_log_is_passed_over() -> None:
    story = begun().log(5, kind="abort", tx="9").log(6, kind="abort", tx="8")
    assert broken(story) == [], "no other process went on"
    assert broken(story.log(6, "decode", kind="abort", tx="8")) == ["G6"]


@pytest.mark.parametrize("indices", [(0, 2), (0, 0), (1,), (0, 1)])
def test_g6_tokens_are_lost_or_told_twice(indices: tuple[int, ...]) -> None:
    story = begun().tell("router", "admit", request="r", root="a")
    for index in indices:
        story.tell("router", "token", session="r-0", attempt=1, index=index, count=1, root="a")
    assert set(broken(story.tell("router", "end", request="r", root="a", tokens=3, whole=True))) == {"G6"}


def test_a_violation_tells_its_evidence() -> None:
    (violation,) = answered(begun(), pin="b").verdict().violations
    assert "request r met two roots" in violation.told
    assert "prefill #1" in violation.told


def test_the_bound_of_none_is_the_rule_of_three() -> None:
    assert upper_bound(0) == pytest.approx(3.0, abs=0.01)
    assert upper_bound(3) == pytest.approx(7.75, abs=0.01)
    verdict = Verdict()
    verdict.events["G1"] = 3_000_000
    assert verdict.per_million("G1") == (0.0, pytest.approx(1.0, abs=0.01))


def test_what_is_recorded_is_read_in_order(tmp_path: Path) -> None:
    with recording(tmp_path, "router", "r-1", "abcdef0123") as recorder:
        assert recorder
        recorder.put("admit", request="r", root=b"\x01" * 32, ref=None)
        recorder.put("end", request="r", root=b"\x01" * 32, whole=True)
    with (tmp_path / "r-1-abcdef01.jsonl").open("a") as file:
        file.write('{"n": 4, "t": 17')  # a kill -9 came in between
    events = read(tmp_path)
    assert [event.kind for event in events] == ["start", "admit", "end"]
    assert events[1].root == "01" * 8
    assert events[1].ref is None


def test_a_record_is_bounded_and_says_what_it_lost(tmp_path: Path) -> None:
    recorder = Recorder(tmp_path / "a.jsonl", "a", most_bytes=300)
    for _ in range(100):
        recorder.put("event", request="r")
    recorder.close()
    assert (tmp_path / "a.jsonl").stat().st_size < 400
    *_, last = read(tmp_path)
    assert last.kind == "full"
    assert last.lost + len(read(tmp_path)) == 102


def test_nothing_is_recorded_unless_it_is_wanted() -> None:
    with recording(None, "router", "r-1", "abcdef0123") as recorder:
        assert recorder is None
