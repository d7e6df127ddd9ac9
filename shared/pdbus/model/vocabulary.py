"""The vocabulary inside a GGUF file as a tokenizer.json of the `tokenizers` library, id for id."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers

from pdbus.model import tokens
from pdbus.model.gguf_metadata import Metadata
from pdbus.model.refusal import CheckpointError, UnsupportedModel
from pdbus.model.source import dump

# The kinds of token that matter here, of gguf's TokenType
_UNKNOWN, _CONTROL, _USER_DEFINED = 2, 3, 4

_QWEN2 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_LLAMA3 = _QWEN2.replace(r"|\p{N}|", r"|\p{N}{1,3}|")
_SPACE = "▁"  # SentencePiece's mark for a space


@dataclass(frozen=True, slots=True)
class Vocabulary:
    meta: dict[str, bytes]
    """tokenizer.json, tokenizer_config.json, generation_config.json, and chat_template.jinja if the file has one."""
    ids: dict[str, int]
    """bos_token_id and eos_token_id for config.json, where the file names them."""


def read_vocabulary(metadata: Metadata) -> Vocabulary:
    """Builds the tokenizer that `metadata` describes. Raises UnsupportedModel for a kind that isn't known exactly."""
    texts = metadata.texts("tokenizer.ggml.tokens")
    kinds = metadata.numbers("tokenizer.ggml.token_type")
    if len(kinds) != len(texts) or len(set(texts)) != len(texts):
        raise CheckpointError.of(metadata.path, "tokenizer.ggml.tokens must be unique and have a token_type each")
    model = metadata.text("tokenizer.ggml.model")
    special = {kind: _special(metadata, kind, texts) for kind in ("bos", "eos", "unknown")}
    try:
        if model == "gpt2":
            tokenizer = _byte_level(metadata, texts)
            bos_by_default = metadata.text("tokenizer.ggml.pre") in ("llama-bpe", "llama3", "llama-v3")
        elif model == "llama":
            tokenizer = _sentencepiece(metadata, texts, special["unknown"])
            bos_by_default = True
        else:
            raise UnsupportedModel(f"{metadata.path}: tokenizer model {model!r:.80} is not served: gpt2 and llama are")
        _add_tokens(tokenizer, texts, kinds)
    except CheckpointError:
        raise
    except Exception as error:  # the library raises plain Exception
        raise CheckpointError.of(metadata.path, f"its vocabulary makes no tokenizer: {error}") from error
    if metadata.flag("tokenizer.ggml.add_eos_token", False):
        raise UnsupportedModel(f"{metadata.path}: add_eos_token would end every prompt before its answer")
    bos = special["bos"]
    if bos is not None and metadata.flag("tokenizer.ggml.add_bos_token", bos_by_default):
        tokens.add_beginning(tokenizer, bos)
    named = tokens.SpecialTokens(bos, special["eos"], special["unknown"])
    return _vocabulary(metadata, tokenizer, named, len(texts))


def _vocabulary(metadata: Metadata, tokenizer: Any, special: tokens.SpecialTokens, size: int) -> Vocabulary:
    ids = {f"{kind}_token_id": metadata.integer(f"tokenizer.ggml.{kind}_token_id", -1) for kind in ("bos", "eos")}
    ids = {name: token for name, token in ids.items() if token >= 0}
    ends = [metadata.integer(f"tokenizer.ggml.{kind}_token_id", size) for kind in ("eos", "eot", "eom")]
    generation = {"eos_token_id": sorted({token for token in ends if 0 <= token < size})}
    meta = {
        "tokenizer.json": tokenizer.to_str().encode(),
        "tokenizer_config.json": tokens.tokenizer_config(tokenizer, special),
        "generation_config.json": dump(
            generation | {"bos_token_id": ids["bos_token_id"]} if "bos_token_id" in ids else generation
        ),
    }
    if "tokenizer.chat_template" in metadata:
        meta["chat_template.jinja"] = metadata.text("tokenizer.chat_template").encode()
    return Vocabulary(meta, ids)


def _special(metadata: Metadata, kind: str, texts: list[str]) -> str | None:
    key = f"tokenizer.ggml.{kind}_token_id"
    if key not in metadata:
        return None
    token = metadata.integer(key)
    if not 0 <= token < len(texts):
        raise CheckpointError.of(metadata.path, f"{key} {token} is not in the vocabulary of {len(texts)}")
    return texts[token]


def _byte_level(metadata: Metadata, texts: list[str]) -> Any:
    """BPE over bytes written as printable characters (GPT-2); how text is cut first is known by a name only."""
    name = metadata.text("tokenizer.ggml.pre", "default")
    if name == "smollm":
        cut = [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    elif name == "gpt-2":
        cut = [pre_tokenizers.ByteLevel(add_prefix_space=False)]
    elif name in ("llama-bpe", "llama3", "llama-v3", "qwen2"):
        pattern = Regex(_QWEN2 if name == "qwen2" else _LLAMA3)
        bytes_only = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        cut = [pre_tokenizers.Split(pattern, "isolated", invert=False), bytes_only]
    elif name == "default":
        raise UnsupportedModel(f"{metadata.path}: it doesn't say how text is cut before BPE; convert the model again")
    else:
        raise UnsupportedModel(
            f"{metadata.path}: pre-tokenizer {name!r:.80} is not served: smollm, llama-bpe, qwen2, gpt-2 are"
        )
    merges = [tuple(merge.split(" ")) for merge in metadata.texts("tokenizer.ggml.merges")]
    if any(len(merge) != 2 for merge in merges):
        raise CheckpointError.of(metadata.path, "tokenizer.ggml.merges must hold pairs")
    vocab = {text: index for index, text in enumerate(texts)}
    whole_words_first = name in ("llama-bpe", "llama3", "llama-v3")
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=merges, ignore_merges=whole_words_first))
    if name == "qwen2":
        tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(cut)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def _sentencepiece(metadata: Metadata, texts: list[str], unknown: str | None) -> Any:
    """SentencePiece BPE: neighbours join if the whole is a token, the best score first; bytes as a last resort."""
    scores = metadata.numbers("tokenizer.ggml.scores")
    vocab = {text: index for index, text in enumerate(texts)}
    if len(scores) != len(texts) or any(f"<0x{byte:02X}>" not in vocab for byte in range(256)):
        raise CheckpointError.of(metadata.path, "its vocabulary needs a score for each token and a token for each byte")
    model = models.BPE(vocab=vocab, merges=_merges(vocab, scores), unk_token=unknown, fuse_unk=True, byte_fallback=True)
    tokenizer = Tokenizer(model)
    to_spaces = [decoders.Replace(_SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    if metadata.flag("tokenizer.ggml.add_space_prefix", True):
        tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend(_SPACE), normalizers.Replace(" ", _SPACE)])
        tokenizer.decoder = decoders.Sequence([*to_spaces, decoders.Strip(" ", 1, 0)])
    else:
        tokenizer.normalizer = normalizers.Replace(" ", _SPACE)
        tokenizer.decoder = decoders.Sequence(to_spaces)
    return tokenizer


def _merges(vocab: dict[str, int], scores: list[float]) -> list[tuple[str, str]]:
    """Every split of every token into two tokens, in the order in which SentencePiece would join them."""
    found = [
        (-scores[index], len(text[:cut]), len(text[cut:]), vocab[text[:cut]], vocab[text[cut:]], text[:cut], text[cut:])
        for text, index in vocab.items()
        for cut in range(1, len(text))
        if text[:cut] in vocab and text[cut:] in vocab
    ]
    return [(entry[5], entry[6]) for entry in sorted(found)]


def _add_tokens(tokenizer: Any, texts: list[str], kinds: list[float]) -> None:
    """Tokens that are found in the text as such, before anything is cut: control tokens and those that users added."""
    special = [text for text, kind in zip(texts, kinds, strict=True) if kind in (_UNKNOWN, _CONTROL)]
    plain = [text for text, kind in zip(texts, kinds, strict=True) if kind == _USER_DEFINED]
    tokenizer.add_special_tokens([AddedToken(text, normalized=False, special=True) for text in special if text])
    tokenizer.add_tokens([AddedToken(text, normalized=False, special=False) for text in plain if text])
