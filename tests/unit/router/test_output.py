"""One choice's tokens become text, listed tokens and an end, without a part of a stop string in either."""

from __future__ import annotations

import itertools
import json

from hypothesis import given
from hypothesis import strategies as st

from loadtest.simulated_version import byte_tokenizer
from pdbus.messages.router import TokenLogprob
from pdbus.router.output import ChoiceOutput, Delta
from pdbus.router.token_bytes import TokenBytes

TOKENS = TokenBytes(byte_tokenizer(), json.loads(byte_tokenizer().to_str()))
LOGPROB = TokenLogprob(-1.0)


def _run(
    text: str, cuts: list[int] | None = None, finish: str | None = "stop", **options: object
) -> tuple[ChoiceOutput, list[Delta]]:
    deltas: list[Delta] = []
    output = ChoiceOutput(0, TOKENS, deltas.append, **({"most_tokens": 1000} | options))  # type: ignore[arg-type]
    output.begin()
    ids = list(text.encode())
    edges = sorted({0, len(ids), *(cut % (len(ids) + 1) for cut in cuts or [])})
    for start, end in itertools.pairwise(edges):
        if output.add(ids[start:end], [LOGPROB] * (end - start), None):
            return output, deltas
    if finish:
        output.add((), (), finish)  # type: ignore[arg-type]
    return output, deltas


def _text(deltas: list[Delta]) -> str:
    return "".join(delta.text for delta in deltas)


def test_text_and_end():
    output, deltas = _run("héllo", [1, 2, 3])
    assert _text(deltas) == "héllo"
    assert [delta.finish for delta in deltas if delta.finish] == ["stop"]
    assert output.ids == list("héllo".encode())


def test_the_length_ends_it_also_where_the_worker_does_not_say():
    output, deltas = _run("abcdef", finish=None, most_tokens=4)
    assert (_text(deltas), output.finish, len(output.ids)) == ("abcd", "length", 4)


def test_a_stop_id_is_no_part_of_the_answer():
    output, deltas = _run("abc", finish=None, stop_ids=frozenset({ord("c")}))
    assert (_text(deltas), output.finish, output.ids) == ("ab", "stop", [97, 98])


def test_a_stop_string_ends_it():
    output, deltas = _run("one, two", [2, 4], finish=None, stops=[", "])
    assert (_text(deltas), output.finish) == ("one", "stop")


def test_what_was_held_back_is_shown_at_the_end():
    _, deltas = _run("to be END", stops=["ENDE"], finish="length")
    assert _text(deltas) == "to be END"


@given(
    st.text(alphabet="abé", max_size=20), st.lists(st.integers(0, 60)), st.text(alphabet="abé", min_size=1, max_size=4)
)
def test_listed_tokens_never_tell_more_than_the_text(text: str, cuts: list[int], stop: str):
    output, deltas = _run(text, cuts, stops=[stop], logprobs=True)
    told = b"".join(bytes([token.id]) for delta in deltas for token in delta.tokens)
    shown = _text(deltas)
    assert shown == text.partition(stop)[0]
    assert told.decode("utf-8", "ignore") == shown
    assert len(output.logprobs) == len(output.ids)


@given(st.text(max_size=20), st.lists(st.integers(0, 60)))
def test_every_token_is_listed_once_where_nothing_stops_it(text: str, cuts: list[int]):
    output, deltas = _run(text, cuts, logprobs=True)
    assert [token.id for delta in deltas for token in delta.tokens] == output.ids
    offsets = [token.offset for delta in deltas for token in delta.tokens]
    assert offsets == sorted(offsets)


def test_an_echoed_prompt_comes_first():
    _, deltas = _run("c", echo=(97, 98), echo_text="ab")
    assert _text(deltas) == "abc"
    assert deltas[0].text == "ab"


def test_an_echoed_prompt_with_log_probabilities_waits_for_them():
    deltas: list[Delta] = []
    output = ChoiceOutput(0, TOKENS, deltas.append, most_tokens=9, logprobs=True, echo=(97, 98), echo_text="ab")
    output.begin()
    assert not deltas
    output.prompt((LOGPROB,))
    output.add([99], [LOGPROB], "length")
    tokens = [token for delta in deltas for token in delta.tokens]
    assert [(token.id, token.logprob, token.offset) for token in tokens] == [
        (97, None, 0),
        (98, LOGPROB, 1),
        (99, LOGPROB, 2),
    ]
    assert _text(deltas) == "abc"
