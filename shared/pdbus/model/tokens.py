"""The tokenizer's part of a checkpoint: checks that a tokenizer.json works, and says what it does."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer, processors

from pdbus.model.refusal import CheckpointError
from pdbus.model.source import dump


@dataclass(frozen=True, slots=True)
class SpecialTokens:
    """The tokens that tokenizer_config.json names, as text; None where the model has no such token."""

    bos: str | None
    eos: str | None
    unk: str | None


def parse_tokenizer(path: Path, content: str) -> Any:
    """A `tokenizers.Tokenizer`. Raises CheckpointError naming `path` if the content is none, or doesn't work."""
    try:
        tokenizer = Tokenizer.from_str(content)
        tokenizer.decode(tokenizer.encode("a").ids)
        return tokenizer
    except Exception as error:  # the library raises plain Exception
        raise CheckpointError.of(path, f"not a tokenizer: {error}") from error


def largest_id(tokenizer: Any) -> int:
    """The largest token id that the tokenizer may produce; -1 if it has none."""
    return max(tokenizer.get_vocab(with_added_tokens=True).values(), default=-1)


def begins_with(tokenizer: Any, token: str | None) -> bool:
    """Does encoding with special tokens begin with `token`?"""
    ids = tokenizer.encode("", add_special_tokens=True).ids
    return token is not None and bool(ids) and ids[0] == tokenizer.token_to_id(token)


def add_beginning(tokenizer: Any, token: str) -> None:
    """Makes encoding with special tokens begin with `token`, after whatever post-processing there was."""
    template = processors.TemplateProcessing(
        single=[token, "$A"],
        pair=[token, "$A", token, "$B:1"],
        special_tokens=[(token, tokenizer.token_to_id(token))],
    )
    earlier = tokenizer.post_processor
    tokenizer.post_processor = template if earlier is None else processors.Sequence([earlier, template])


def tokenizer_config(tokenizer: Any, special: SpecialTokens) -> bytes:
    """tokenizer_config.json of a served version.

    `add_bos_token` tells what tokenizer.json does when it encodes with special tokens: it decides, this reports.
    """
    content: dict[str, object] = {"add_bos_token": begins_with(tokenizer, special.bos)}
    named = {"bos_token": special.bos, "eos_token": special.eos, "unk_token": special.unk}
    return dump(content | {name: token for name, token in named.items() if token is not None})
