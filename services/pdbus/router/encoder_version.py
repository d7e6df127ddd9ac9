"""A version of an encoder as the router needs it: its config, and texts to token ids by its tokenizer.json."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import tokenizers

from pdbus.errors import InvalidRequest
from pdbus.messages.common import Digest
from pdbus.model.encoder_config import EncoderConfig
from pdbus.router.encode_texts import encode_texts


class TextIds:
    """Stateless once built; may be used in any thread."""

    def __init__(self, tokenizer_json: bytes) -> None:
        """Raises InvalidRequest where the file can't be used, with the reason."""
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
