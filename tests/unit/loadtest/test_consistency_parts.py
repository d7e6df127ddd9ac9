"""What the consistency run rests on: faults that are drawn and hit messages only, answers that are judged rightly."""

from __future__ import annotations

import random
from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from loadtest.checker import watermark
from loadtest.checker.answers import TOKENS, Answer, judge
from loadtest.checker.changes import marks_of, told, versions
from loadtest.checker.proxy import Faults, Parser
from loadtest.checker.records import Verdict, Violation
from loadtest.checker.run import Found
from loadtest.checker.watermark import Marks
from loadtest.consistency.command import render
from pdbus.messages.changelog import Commit, LogEntry
from pdbus.weights.history import History

STREAM = (
    b"INFO {}\r\nMSG pd.v1.presence.a.b 1 5\r\nhe\r\no\r\nPONG\r\n"
    b"HMSG pd.v1.tokens.r 9 _INBOX.x 14 16\r\nNATS/1.0\r\nA\r\n12\r\n-ERR 'x'\r\nMSG _INBOX.y 3 0\r\n\r\n"
)
SUBJECTS = ["", "pd.v1.presence.a.b", "", "pd.v1.tokens.r", "", "_INBOX.y"]


@given(st.lists(st.integers(1, 40), min_size=1))
def test_a_stream_is_cut_into_messages_wherever_it_arrives_in_pieces(sizes: list[int]) -> None:
    parser, found, at = Parser(), [], 0
    for size in [*sizes, len(STREAM)]:
        found += parser.feed(STREAM[at : at + size])
        at += size
    assert b"".join(whole for _, whole in found) == STREAM
    assert [subject for subject, _ in found] == SUBJECTS


def test_faults_are_drawn_from_the_seed_and_only_while_they_are_on() -> None:
    def draws(seed: int, on: bool) -> list[tuple[float, ...]]:
        faults, rng = Faults(seed, on), random.Random(seed)
        return [faults.draw("pd.v1.presence.a.b", rng) for _ in range(500)]

    assert draws(1, on=True) == draws(1, on=True) != draws(2, on=True)
    assert set(draws(1, on=False)) == {(0.0,)}
    copies = Counter(len(delays) for delays in draws(1, on=True))
    assert copies[0] > 0 < copies[2], "some are lost, some come twice"
    assert Faults(1, on=True).draw("some.other.subject", random.Random(1)) == (0.0,)


def answered(prompt: tuple[int, ...], root: str, ids: list[int]) -> Answer:
    return Answer(prompt, "m", 0.0, end_s=1.0, root=root, ids=ids)


def test_answers_are_right_mixed_or_wrong() -> None:
    one, two, prompt = Marks.pure(1), Marks.pure(2), (1, 2, 3)
    right = watermark.answer(one, prompt, TOKENS)
    answers = [
        answered(prompt, "a", right),
        answered(prompt, "a", watermark.answer(two, prompt, TOKENS)),
        answered(prompt, "a", watermark.answer(one.layers(2, 1), prompt, TOKENS)),
        answered(prompt, "a", watermark.answer(one, (1, 2, 4), TOKENS)),
        answered(prompt, "a", right[:-1]),
        answered(prompt, "x", right),
        Answer(prompt, "m", 0.0, refused="overloaded"),
        Answer(prompt, "m", 0.0, failed="ClientError"),
    ]
    found = judge(answers, {"a": one, "b": two})
    assert (found.right, len(found.mixed), len(found.wrong)) == (1, 2, 3)
    assert (found.refused.total(), found.failed.total()) == (1, 1)
    assert "layer 1 tells" in found.mixed[1]


def test_a_commit_says_which_versions_its_parts_are_of() -> None:
    marks = Marks.pure(3).layers(4, 2).top(5)
    assert marks_of(told(marks)) == marks
    assert marks_of("checkpoint tiny") is None
    history = History()
    history.apply(1, 0, LogEntry(commit=Commit("1", b"a", None, "server", "checkpoint", ())))
    history.apply(2, 0, LogEntry(commit=Commit("2", b"b", b"a", "checker", told(marks), ())))
    assert versions(history) == {b"a": Marks(), b"b": marks}


def test_a_report_tells_what_is_wrong_and_is_not_sound_then() -> None:
    prompt, one = (1, 2, 3), Marks.pure(1)
    judged = judge([answered(prompt, "a", watermark.answer(one, prompt, TOKENS))], {"a": one})
    found = Found(7, 1.0, judged, Verdict(), Counter(), Counter(), Counter(), [], settled=True)
    assert found.sound
    found.verdict.violations.append(Violation("G4", "a stale page", ()))
    assert not found.sound
    assert "G4: a stale page" in render(found)
