from __future__ import annotations

import json
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer
from transformers import AutoTokenizer

from pdbus.model.checkpoint import open_checkpoint
from pdbus.model.default import default_checkpoint
from pdbus.model.refusal import CheckpointError
from tests.support.checkpoints import tiny_checkpoint, tiny_tokenizer
from tests.support.gguf_files import tiny_gguf

REFERENCE = Path(__file__).parents[2] / "data" / "reference" / "smollm2.json"
TEXTS = [
    "",
    " ",
    "The capital of France is Paris.",
    "  two  spaces, tabs\t\tand\r\n\r\nlines \n",
    "Don't we'LL I'm THEY'RE x's",
    "Numbers 1 22 333 4444 55555, 3.14, ½ and ٣٤",
    "naïve café e\u0301, 東京タワー 🚀👩‍🚀 <0x0A>",
    "<|im_start|>user\nHello<|im_end|>\n",
    "a<|im_start|> b",
]


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_checkpoint(tmp_path_factory.mktemp("hf"), "llama")


def tokenizer_of(folder: Path, file: Path, **metadata: Any) -> Tokenizer:
    keys = {f"tokenizer.ggml.{key}": value for key, value in metadata.items()}
    checkpoint = open_checkpoint(tiny_gguf(folder, file, metadata=keys))
    return Tokenizer.from_str(checkpoint.meta["tokenizer.json"].decode())


@cache
def smollm() -> Tokenizer:
    return Tokenizer.from_str(open_checkpoint(default_checkpoint()).meta["tokenizer.json"].decode())


def test_the_default_model_tokenizes_as_the_reference_does() -> None:
    cases = json.loads(REFERENCE.read_text())["cases"]
    assert cases
    for case in cases:
        assert smollm().encode(case["prompt"]).ids == case["token_ids"]
        assert smollm().decode(case["greedy_ids"], skip_special_tokens=False) == case["greedy_text"]


@settings(deadline=None)
@given(st.text("abcXYZ 012,.'!?<|>_\t\n\r\u00a0äéß東京日本語Привет🚀👩", max_size=60))
def test_text_survives_the_default_tokenizer(text: str) -> None:
    assert smollm().decode(smollm().encode(text).ids, skip_special_tokens=False) == text


def test_digits_stand_alone_in_the_default_tokenizer() -> None:
    assert smollm().encode("x12345").tokens == ["x", "1", "2", "3", "4", "5"]


@pytest.mark.parametrize("name", ["gpt-2", "llama-bpe", "qwen2", "tekken", "deepseek-r1-qwen"])
def test_byte_level_vocabularies_tokenize_as_in_transformers(llama: Path, tmp_path: Path, name: str) -> None:
    ours = tokenizer_of(llama, tmp_path / "tiny.gguf", pre=name, add_bos_token=False)
    theirs = AutoTokenizer.from_pretrained(tmp_path, gguf_file="tiny.gguf")
    theirs.backend_tokenizer.model.ignore_merges = ours.model.ignore_merges
    for text in TEXTS:
        # transformers leaves out the composed form here that Qwen's own tokenizer.json asks for
        composed = ours.normalizer.normalize_str(text) if ours.normalizer else text
        assert ours.encode(text).ids == theirs.encode(composed, add_special_tokens=False), text


def test_the_vocabulary_keeps_its_ids_and_special_tokens(llama: Path, tmp_path: Path) -> None:
    ours, original = tokenizer_of(llama, tmp_path / "tiny.gguf"), tiny_tokenizer()
    assert ours.get_vocab() == original.get_vocab()
    assert [ours.encode(text).ids for text in TEXTS] == [original.encode(text).ids for text in TEXTS]
    assert ours.decode([1, 2], skip_special_tokens=True) == ""
    assert ours.decode([1, 2], skip_special_tokens=False) == "<|im_start|><|im_end|>"


def test_tokens_that_users_added_are_whole_but_not_special(llama: Path, tmp_path: Path) -> None:
    kinds = [4, 3, 3] + [1] * 317
    ours = tokenizer_of(llama, tmp_path / "tiny.gguf", token_type=kinds)
    assert ours.encode("a<|endoftext|>b").ids[1] == 0
    assert ours.decode([0, 1], skip_special_tokens=True) == "<|endoftext|>"


@pytest.mark.parametrize(
    ("pre", "flag", "added"),
    [("gpt-2", None, False), ("llama-bpe", None, True), ("llama-bpe", False, False), ("gpt-2", True, True)],
)
def test_the_beginning_token_is_added_as_llama_cpp_would(
    llama: Path, tmp_path: Path, pre: str, flag: bool | None, added: bool
) -> None:
    ours = tokenizer_of(llama, tmp_path / "tiny.gguf", pre=pre, add_bos_token=flag)
    assert (ours.encode("Paris").ids[0] == 1) == added
    assert ours.encode("Paris", add_special_tokens=False).ids[0] != 1
    meta = open_checkpoint(tmp_path / "tiny.gguf").meta
    assert json.loads(meta["tokenizer_config.json"])["add_bos_token"] == added


def test_every_token_that_ends_an_answer_is_told(llama: Path, tmp_path: Path) -> None:
    file = tiny_gguf(llama, tmp_path / "tiny.gguf", metadata={"tokenizer.ggml.eot_token_id": 0})
    assert json.loads(open_checkpoint(file).meta["generation_config.json"])["eos_token_id"] == [0, 2]


SPM_WORDS = ["▁", "t", "h", "e", "a", "n", "▁t", "he", "▁the", "th", "an", "▁a", "▁an", "hen", "▁then", "nn"]
SPM_TOKENS = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *SPM_WORDS]
SPM = {
    "model": "llama",
    "pre": None,
    "merges": None,
    "tokens": SPM_TOKENS,
    "scores": [0.0] * 259 + [-float(index) for index in range(len(SPM_WORDS))],
    "token_type": [2, 3, 3] + [6] * 256 + [1] * len(SPM_WORDS),
    "unknown_token_id": 0,
}


@pytest.fixture(scope="module")
def spm(llama: Path, tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return tokenizer_of(llama, tmp_path_factory.mktemp("spm") / "tiny.gguf", **SPM)


def sentencepiece(text: str) -> list[int]:
    """SentencePiece's BPE, by its definition: join the pair with the best score, the leftmost first."""
    ids = {token: index for index, token in enumerate(SPM_TOKENS)}
    scores: list[float] = SPM["scores"]  # type: ignore[assignment]
    pieces = list(f" {text}".replace(" ", "▁")) if text else []
    while True:
        pairs = [(scores[ids[a + b]], -at) for at, (a, b) in enumerate(pairwise(pieces)) if a + b in ids]
        if not pairs:
            break
        at = -max(pairs)[1]
        pieces[at : at + 2] = [pieces[at] + pieces[at + 1]]
    return [
        token
        for piece in pieces
        for token in ([ids[piece]] if piece in ids else [ids[f"<0x{byte:02X}>"] for byte in piece.encode()])
    ]


@settings(deadline=None)
@given(st.text(alphabet="then a▁é\n", max_size=24))
def test_sentencepiece_vocabularies_join_by_score_and_fall_back_to_bytes(spm: Tokenizer, text: str) -> None:
    encoded = spm.encode(text).ids
    assert encoded == [1, *sentencepiece(text)]
    assert spm.decode(encoded) == text.replace("▁", " ")


def test_without_a_space_prefix_none_is_added_or_taken(llama: Path, tmp_path: Path) -> None:
    ours = tokenizer_of(llama, tmp_path / "tiny.gguf", **SPM, add_space_prefix=False, add_bos_token=False)
    assert ours.encode("then").tokens == ["t", "hen"] or ours.encode("then").tokens == ["th", "e", "n"]
    assert ours.decode(ours.encode(" the an").ids) == " the an"


@pytest.mark.parametrize(
    ("metadata", "reason"),
    [
        ({"model": "t5"}, "tokenizer model 't5' is not served"),
        ({"model": None}, "tokenizer.ggml.model is missing"),
        ({"pre": "chatglm-bpe"}, "pre-tokenizer 'chatglm-bpe' is not served"),
        ({"pre": None}, "doesn't say how text is cut"),
        ({"pre": "default"}, "doesn't say how text is cut"),
        ({"merges": ["a"]}, "makes no tokenizer"),
        ({"merges": ["never there"]}, "makes no tokenizer"),
        ({"token_type": [1, 2]}, "must be unique and have a token_type each"),
        ({"eos_token_id": 320}, "eos_token_id 320 is not in the vocabulary"),
        ({"tokens": 3}, "must be a list of texts"),
        ({"add_eos_token": True}, "add_eos_token"),
        ({**SPM, "scores": [1.0]}, "needs a score for each token"),
        ({**SPM, "tokens": [f"{index}" for index in range(275)]}, "a token for each byte"),
        ({"tokens": ["x" * 600, *map(str, range(319))]}, "more than 512 characters"),
    ],
)
def test_a_vocabulary_that_is_not_known_exactly_is_refused(
    llama: Path, tmp_path: Path, metadata: dict[str, Any], reason: str
) -> None:
    with pytest.raises(CheckpointError, match=reason) as refusal:
        tokenizer_of(llama, tmp_path / "tiny.gguf", **metadata)
    assert str(tmp_path / "tiny.gguf") in refusal.value.message
