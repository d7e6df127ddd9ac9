"""The vocabulary inside a GGUF file as a tokenizer.json of the `tokenizers` library, id for id."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers

from pdbus.model import tokens
from pdbus.model.gguf_metadata import Metadata
from pdbus.model.pretokenizer import CUTS, Cut
from pdbus.model.refusal import CheckpointError, UnsupportedModel
from pdbus.model.source import dump

# The kinds of token that matter here, of gguf's TokenType
_UNKNOWN, _CONTROL, _USER_DEFINED = 2, 3, 4
MAX_TOKEN_CHARS = 512
_SPACE = "▁"  # SentencePiece's mark for a space


@dataclass(frozen=True, slots=True)
class Vocabulary:
    meta: dict[str, bytes]
    """tokenizer.json, tokenizer_config.json, generation_config.json, and chat_template.jinja if the file has one."""
    ids: dict[str, int]
    """bos_token_id and eos_token_id for config.json, where the file names them."""
    largest_id: int


def read_vocabulary(metadata: Metadata) -> Vocabulary:
    """Builds the tokenizer that `metadata` describes.

    Raises CheckpointError for a broken vocabulary, UnsupportedModel for a kind that isn't known exactly.
    """
    texts = metadata.texts("tokenizer.ggml.tokens")
    kinds = metadata.numbers("tokenizer.ggml.token_type")
    if len(kinds) != len(texts) or len(set(texts)) != len(texts):
        raise CheckpointError.of(metadata.path, "tokenizer.ggml.tokens must be unique and have a token_type each")
    if max(map(len, texts), default=0) > MAX_TOKEN_CHARS:
        raise CheckpointError.of(
            metadata.path, f"a token of more than {MAX_TOKEN_CHARS} characters is in its vocabulary"
        )
    if metadata.flag("tokenizer.ggml.add_eos_token", False):
        raise UnsupportedModel(f"{metadata.path}: add_eos_token would end every prompt before its answer")
    special = tokens.SpecialTokens(*(_special(metadata, kind, texts) for kind in ("bos", "eos", "unknown")))
    model = metadata.text("tokenizer.ggml.model")
    cut = _cut(metadata) if model == "gpt2" else None
    if model not in ("gpt2", "llama"):
        raise UnsupportedModel(f"{metadata.path}: tokenizer model {model!r:.80} is not served: gpt2 and llama are")
    try:
        tokenizer = _byte_level(metadata, texts, cut) if cut else _sentencepiece(metadata, texts, special.unk)
        _add_tokens(tokenizer, texts, kinds)
    except CheckpointError:
        raise
    except Exception as error:  # the library raises plain Exception
        raise CheckpointError.of(metadata.path, f"its vocabulary makes no tokenizer: {error}") from error
    bos_by_default = cut is None or cut.bos
    if special.bos is not None and metadata.flag("tokenizer.ggml.add_bos_token", bos_by_default):
        tokens.add_beginning(tokenizer, special.bos)
    return _vocabulary(metadata, tokenizer, special, len(texts))


def _vocabulary(metadata: Metadata, tokenizer: Any, special: tokens.SpecialTokens, size: int) -> Vocabulary:
    named = {kind: metadata.integer(f"tokenizer.ggml.{kind}_token_id", -1) for kind in ("bos", "eos", "eot", "eom")}
    named = {kind: token for kind, token in named.items() if 0 <= token < size}
    ids = {f"{kind}_token_id": named[kind] for kind in ("bos", "eos") if kind in named}
    # An instruct model may end its turn (eot) or its message (eom) by other tokens than the text (eos)
    ends = sorted({token for kind, token in named.items() if kind != "bos"})
    meta = {
        "tokenizer.json": tokenizer.to_str().encode(),
        "tokenizer_config.json": tokens.tokenizer_config(tokenizer, special),
        "generation_config.json": dump(ids | {"eos_token_id": ends}),
    }
    if "tokenizer.chat_template" in metadata:
        meta["chat_template.jinja"] = metadata.text("tokenizer.chat_template").encode()
    return Vocabulary(meta, ids, size - 1)


def _special(metadata: Metadata, kind: str, texts: list[str]) -> str | None:
    key = f"tokenizer.ggml.{kind}_token_id"
    if key not in metadata:
        return None
    token = metadata.integer(key)
    if not 0 <= token < len(texts):
        raise CheckpointError.of(metadata.path, f"{key} {token} is not in the vocabulary of {len(texts)}")
    return texts[token]


def _cut(metadata: Metadata) -> Cut:
    name = metadata.text("tokenizer.ggml.pre", "default")
    if name == "default":
        raise UnsupportedModel(f"{metadata.path}: it doesn't say how text is cut before BPE; convert the model again")
    if name not in CUTS:
        raise UnsupportedModel(
            f"{metadata.path}: pre-tokenizer {name!r:.80} is not served; these are: {', '.join(CUTS)}"
        )
    return CUTS[name]


def _byte_level(metadata: Metadata, texts: list[str], cut: Cut) -> Any:
    """BPE over bytes, which are written as printable characters (GPT-2)."""
    pairs = [merge.partition(" ") for merge in metadata.texts("tokenizer.ggml.merges")]
    merges = [(left, right) for left, _, right in pairs]
    vocab = {text: index for index, text in enumerate(texts)}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=merges, ignore_merges=cut.whole_words))
    normalizer = cut.normalizer()
    if normalizer is not None:
        tokenizer.normalizer = normalizer
    tokenizer.pre_tokenizer = cut.pre_tokenizer()
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def _sentencepiece(metadata: Metadata, texts: list[str], unknown: str | None) -> Any:
    """SentencePiece BPE: neighbours join if the whole is a token, the best score first; bytes as a last resort."""
    scores = metadata.numbers("tokenizer.ggml.scores")
    vocab = {text: index for index, text in enumerate(texts)}
    if len(scores) != len(texts) or any(f"<0x{byte:02X}>" not in vocab for byte in range(256)):
        raise CheckpointError.of(metadata.path, "its vocabulary needs a score for each token and a token for each byte")
    merges = _merges(vocab, scores)
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=merges, unk_token=unknown, fuse_unk=True, byte_fallback=True))
    to_text: list[Any] = [decoders.Replace(_SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    to_marks: list[Any] = [normalizers.Replace(" ", _SPACE)]
    if metadata.flag("tokenizer.ggml.add_space_prefix", True):
        to_marks = [normalizers.Prepend(_SPACE), *to_marks]
        to_text = [*to_text, decoders.Strip(" ", 1, 0)]
    tokenizer.normalizer = normalizers.Sequence(to_marks)
    tokenizer.decoder = decoders.Sequence(to_text)
    return tokenizer


def _merges(vocab: dict[str, int], scores: list[float]) -> list[tuple[str, str]]:
    """Every split of every token into two tokens, in the order in which SentencePiece would join them."""
    found = [
        (-scores[index], index, cut)
        for text, index in vocab.items()
        for cut in range(1, len(text))
        if text[:cut] in vocab and text[cut:] in vocab
    ]
    by_index = list(vocab)
    return [(by_index[index][:cut], by_index[index][cut:]) for _, index, cut in sorted(found)]


def _add_tokens(tokenizer: Any, texts: list[str], kinds: list[float]) -> None:
    """Tokens that are found in the text as such, before anything is cut: control tokens and those that users added."""
    special = [text for text, kind in zip(texts, kinds, strict=True) if kind in (_UNKNOWN, _CONTROL)]
    plain = [text for text, kind in zip(texts, kinds, strict=True) if kind == _USER_DEFINED]
    tokenizer.add_special_tokens([AddedToken(text, normalized=False, special=True) for text in special if text])
    tokenizer.add_tokens([AddedToken(text, normalized=False, special=False) for text in plain if text])
