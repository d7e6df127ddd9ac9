"""A tokenizer.json that contradicts itself refuses texts; it brings nobody down."""

from __future__ import annotations

import json

import pytest
import tokenizers

from pdbus.errors import InvalidRequest
from pdbus.router.encode_texts import encode_texts


def tokenizer(vocabulary: dict[str, int], **also: object) -> tokenizers.Tokenizer:
    model = {"type": "WordPiece", "unk_token": "[UNK]", "continuing_subword_prefix": "##", "vocab": vocabulary}
    model |= {"max_input_chars_per_word": 100}
    return tokenizers.Tokenizer.from_str(json.dumps({"version": "1.0", "added_tokens": [], "model": model} | also))


WHOLE = {"[UNK]": 0, "a": 1}
MISSING = {
    "type": "TemplateProcessing",
    "single": [{"SpecialToken": {"id": "[CLS]", "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}],
    "pair": [],
    "special_tokens": {},
}
"""A template of a token that it doesn't describe."""


def test_texts_of_a_sound_file():
    assert encode_texts(tokenizer(WHOLE), ["a", "b", ""], param="input") == [(1,), (0,), ()]


def test_no_token_for_what_is_unknown():
    with pytest.raises(InvalidRequest, match=r"this version's tokenizer can't read the text.*UNK") as caught:
        encode_texts(tokenizer({"a": 1}), ["b"], param="input")
    assert caught.value.param == "input"


def test_a_text_that_is_none():
    with pytest.raises(InvalidRequest, match="lone surrogate"):
        encode_texts(tokenizer(WHOLE), ["\ud800"], param="prompt")


@pytest.mark.parametrize("error", [KeyboardInterrupt, SystemExit])
def test_what_is_no_fault_of_the_file_goes_on(error: type[BaseException]):
    class Ending:
        def encode_batch(self, *_: object, **__: object) -> None:
            raise error

    with pytest.raises(error):
        encode_texts(Ending(), ["a"], param="input")  # type: ignore[arg-type]


def test_the_library_panics():
    with pytest.raises(InvalidRequest, match="can't read the text: no entry found"):
        encode_texts(tokenizer(WHOLE, post_processor=MISSING), ["a"], param="input")
