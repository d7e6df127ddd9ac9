"""A version of an encoder as the router needs it: its config, and texts to token ids by its tokenizer.json."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import tokenizers

from pdbus.canonical import content_digest
from pdbus.errors import InvalidRequest
from pdbus.messages.common import Digest
from pdbus.model.encoder_config import EncoderConfig
from pdbus.router.encode_texts import encode_texts


class TextIds:
    """Stateless once built; may be used in any thread. One for all versions that have the same file, as Tokenizer."""

    def __init__(self, tokenizer_json: bytes, known: Iterable[TextIds] = ()) -> None:
        """`known`: of other versions. Raises InvalidRequest where the file can't be used, with the reason."""
        self._made_of = content_digest(tokenizer_json)
        self._tokenizer: tokenizers.Tokenizer
        same = next((other for other in known if other._made_of == self._made_of), None)
        if same is not None:
            self._tokenizer = same._tokenizer
            return
        try:
            self._tokenizer = tokenizers.Tokenizer.from_buffer(tokenizer_json)
        except Exception as error:  # tokenizers raises plain Exception
            raise InvalidRequest(f"the tokenizer files can't be read: {error}") from None
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()

    def encode(self, texts: Sequence[str]) -> list[tuple[int, ...]]:
        """With the special tokens around each ([CLS] and [SEP], say), whole however long. Raises as `encode_texts`."""
        return encode_texts(self._tokenizer, texts, param="input")


@dataclass(frozen=True)
class EncoderVersion:
    """One root, ready to tokenize for."""

    root: Digest
    config: EncoderConfig
    tokenizer: TextIds
