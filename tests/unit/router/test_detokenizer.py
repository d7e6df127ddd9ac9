"""Text comes whole characters at a time, equals decoding all at once, and never shows a part of a stop string."""

from __future__ import annotations

import json

import pytest
import tokenizers
from hypothesis import example, given
from hypothesis import strategies as st
from tokenizers import decoders, models

from loadtest.simulated_version import byte_tokenizer
from pdbus.errors import InvalidRequest
from pdbus.router.detokenizer import Detokenizer, StopMatcher
from pdbus.router.token_bytes import TokenBytes

BYTE_LEVEL = byte_tokenizer()
BYTE_LEVEL.add_tokens(["ünïcode token"])


def _fallback() -> tokenizers.Tokenizer:
    """As SentencePiece models become: words with ▁, and a token for each byte."""
    words = ["<unk>", "▁", "▁the", "the", "▁cat", "s", "é", "▁日", "本"]
    vocab = {word: i for i, word in enumerate(words)} | {f"<0x{i:02X}>": len(words) + i for i in range(256)}
    tokenizer = tokenizers.Tokenizer(models.BPE(vocab=vocab, merges=[], unk_token="<unk>", byte_fallback=True))
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    tokenizer.decoder = decoders.Sequence(steps)
    return tokenizer


FALLBACK = _fallback()


def _token_bytes(tokenizer: tokenizers.Tokenizer) -> TokenBytes:
    return TokenBytes(tokenizer, json.loads(tokenizer.to_str()))


def _pieces(tokenizer: tokenizers.Tokenizer, ids: list[int]) -> list[str]:
    detokenizer = Detokenizer(_token_bytes(tokenizer))
    return [*(detokenizer.add(i) for i in ids), detokenizer.flush()]


@given(st.lists(st.integers(0, 259), max_size=40))
@example([0xE6, 0x97, 0xA5, 256, 0xE6, 0x97, 258, 0xA5])
def test_byte_level_equals_decoding_at_once(ids: list[int]):
    assert "".join(_pieces(BYTE_LEVEL, ids)) == BYTE_LEVEL.decode(ids, skip_special_tokens=True)


@given(st.text(max_size=20).filter(lambda text: "<|" not in text))  # special tokens are not shown
def test_characters_come_whole(text: str):
    ids = BYTE_LEVEL.encode(text, add_special_tokens=False).ids
    pieces = _pieces(BYTE_LEVEL, ids)
    assert "".join(pieces) == text
    assert all("�" not in piece for piece in pieces) or "�" in text


@given(
    st.lists(st.sampled_from(["▁the", "the", "▁cat", "s", "é", "▁日", "本", "日本", "😀", "\x00", "ß"]), max_size=12)
)
def test_byte_fallback_equals_decoding_at_once(words: list[str]):
    """Behind a prompt: the decoder's strip of the text's first space is the prompt's, not the answer's."""
    vocab = FALLBACK.get_vocab()
    ids = [
        i
        for word in words
        for i in ([vocab[word]] if word in vocab else [vocab[f"<0x{byte:02X}>"] for byte in word.encode()])
    ]
    prompt = [vocab["▁the"]]
    assert "the" + "".join(_pieces(FALLBACK, ids)) == FALLBACK.decode(prompt + ids)


def test_an_id_beyond_the_vocabulary_is_nothing():
    assert _pieces(BYTE_LEVEL, [97, 9999, 98]) == ["a", "", "b", ""]


def test_special_tokens_are_no_text():
    assert _pieces(BYTE_LEVEL, [97, 257, 98]) == ["a", "", "b", ""]


def test_an_unknown_kind_of_decoder_is_refused():
    tokenizer = tokenizers.Tokenizer(models.WordPiece({"a": 0}, unk_token="a"))
    tokenizer.decoder = decoders.WordPiece()
    with pytest.raises(InvalidRequest, match="WordPiece"):
        _token_bytes(tokenizer)


def _cut(text: str, stops: list[str]) -> tuple[str, bool]:
    """What the matcher promises, worked out on the whole text."""
    ends = [(at + len(stop), at) for stop in stops for at in range(len(text)) if text.startswith(stop, at)]
    return (text[: min(ends)[1]], True) if ends else (text, False)


_AB = st.text(alphabet="ab", max_size=30)


@given(st.lists(_AB, max_size=8), st.lists(st.text(alphabet="ab", min_size=1, max_size=5), max_size=3))
def test_stop_strings_cut_alike_however_the_text_comes(pieces: list[str], stops: list[str]):
    matcher = StopMatcher(stops)
    shown = "".join(matcher.add(piece) for piece in pieces)
    shown += "" if matcher.matched else matcher.flush()
    assert (shown, matcher.matched) == _cut("".join(pieces), stops)


@given(st.lists(_AB, max_size=8), st.lists(st.text(alphabet="ab", min_size=1, max_size=5), min_size=1, max_size=3))
def test_nothing_shown_is_ever_part_of_a_stop_string(pieces: list[str], stops: list[str]):
    whole, _ = _cut("".join(pieces), stops)
    matcher, shown = StopMatcher(stops), ""
    for piece in pieces:
        shown += matcher.add(piece)
        assert whole.startswith(shown)


def test_text_that_begins_no_stop_string_is_not_held_back():
    matcher = StopMatcher(["END"])
    assert matcher.add("hello E") == "hello "
    assert matcher.add("x") == "Ex"


@pytest.mark.parametrize("kind", [True, None, 5, [], {}, "Other"])
def test_a_decoder_of_no_known_kind_is_refused(kind: object) -> None:
    """The library takes some steps by their other fields, whatever their type is said to be."""
    for decoder in ({"type": kind}, {"type": "Sequence", "decoders": [{"type": kind}]}, {"type": "Sequence"}, kind):
        with pytest.raises(InvalidRequest, match="decoder"):
            TokenBytes(byte_tokenizer(), {"decoder": decoder})
