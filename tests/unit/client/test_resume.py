"""A repeated stream, cut differently: nothing twice, nothing missing, and never two versions in one answer."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdbus.backoff import backoff_s
from pdbus.client.resume import Resumed
from pdbus.errors import Corrupt


def _stream(
    text: str, cuts: list[int], *, chat: bool, logprobs: bool, id: str, root: str = "r"
) -> list[dict[str, Any]]:
    edges = sorted({0, len(text), *(cut % (len(text) + 1) for cut in cuts)})
    pieces = [text[a:b] for a, b in itertools.pairwise(edges)] or [""]
    chunks = []
    for number, piece in enumerate(pieces):
        finish = "stop" if number == len(pieces) - 1 else None
        choice: dict[str, Any] = {"index": 0, "finish_reason": finish, "logprobs": None}
        choice["token_ids"] = [ord(letter) for letter in piece]
        if chat:
            choice["delta"] = {"content": piece} | ({"role": "assistant"} if number == 0 else {})
            if logprobs:
                choice["logprobs"] = {"content": [{"token": letter} for letter in piece], "refusal": None}
        else:
            choice["text"] = piece
            if logprobs:
                lists = {name: list(piece) for name in ("tokens", "token_logprobs", "top_logprobs", "text_offset")}
                choice["logprobs"] = lists
        chunks.append({"id": id, "system_fingerprint": root, "choices": [choice]})
    chunks.append({"id": id, "system_fingerprint": root, "choices": [], "usage": {"total_tokens": len(text)}})
    return chunks


@given(
    st.text(max_size=12),
    st.lists(st.tuples(st.lists(st.integers(0, 20), max_size=5), st.integers(0, 6)), max_size=3),
    st.lists(st.integers(0, 20), max_size=5),
    st.booleans(),
    st.booleans(),
)
def test_the_answer_comes_once(
    text: str, broken: list[tuple[list[int], int]], last: list[int], chat: bool, logprobs: bool
):
    resumed, got = Resumed(), []
    streams = [
        _stream(text, cuts, chat=chat, logprobs=logprobs, id=f"i{n}")[:end] for n, (cuts, end) in enumerate(broken)
    ]
    streams = [stream for stream in streams if all(chunk["choices"] for chunk in stream)]  # the whole ones end it
    for stream in [*streams, _stream(text, last, chat=chat, logprobs=logprobs, id="last")]:
        resumed.begin()
        got += [new for chunk in stream if (new := resumed.new(chunk)) is not None]
    choices = [choice for chunk in got for choice in chunk["choices"]]
    assert "".join(c["delta"].get("content", "") if chat else c["text"] for c in choices) == text
    assert [token for c in choices for token in c["token_ids"]] == [ord(letter) for letter in text]
    listed = [t for c in choices if c["logprobs"] for t in c["logprobs"]["content" if chat else "tokens"]]
    assert len(listed) == (len(text) if logprobs else 0)
    assert [c["finish_reason"] for c in choices if c["finish_reason"]] == ["stop"]
    assert len({chunk["id"] for chunk in got}) == 1
    assert sum("usage" in chunk for chunk in got) == 1
    if chat:
        assert [c["delta"].get("role") for c in choices if "role" in c["delta"]] == ["assistant"]


def test_another_text_is_not_spliced_on():
    resumed = Resumed()
    resumed.new(_stream("abc", [1], chat=False, logprobs=False, id="a")[0])
    resumed.begin()
    with pytest.raises(Corrupt):
        resumed.new(_stream("xbc", [1], chat=False, logprobs=False, id="b")[0])


def test_tokens_without_text_come_once():
    """Such as the beginning of a character that a later token completes."""

    def chunk(ids: list[int], text: str) -> dict[str, Any]:
        choice = {"index": 0, "text": text, "token_ids": ids, "finish_reason": None, "logprobs": None}
        return {"id": "a", "system_fingerprint": "r", "choices": [choice]}

    resumed, got = Resumed(), []
    for stream in ([chunk([7], ""), chunk([8], "")], [chunk([7, 8, 9], "é")]):
        resumed.begin()
        got += [new for told in stream if (new := resumed.new(told)) is not None]
    assert [new["choices"][0]["token_ids"] for new in got] == [[7], [8], [9]]
    resumed.begin()
    with pytest.raises(Corrupt):
        resumed.new(chunk([7, 7], ""))


def test_another_version_is_not_spliced_on():
    resumed = Resumed()
    resumed.new(_stream("abc", [1], chat=False, logprobs=False, id="a")[0])
    resumed.begin()
    with pytest.raises(Corrupt):
        resumed.new(_stream("abc", [1], chat=False, logprobs=False, id="b", root="s")[0])


@given(st.integers(1, 10_000), st.randoms(use_true_random=False))
def test_backoff_is_jittered_and_bounded(retry: int, rng: Any):
    assert 0 <= backoff_s(retry, rng) <= min(1.0, 0.05 * 2 ** min(retry - 1, 30))
