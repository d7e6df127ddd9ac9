"""Text to token ids, by the tokenizer.json and tokenizer_config.json of a root's `meta`."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import tokenizers

from pdbus.canonical import content_digest
from pdbus.errors import InvalidRequest
from pdbus.router.encode_texts import encode_texts
from pdbus.router.token_bytes import TokenBytes


class Tokenizer:
    """Stateless once built; `encode` may run in any thread. One for all versions that have the same file: each keeps
    a cache of words in every thread that it was used in, which the library frees only with the thread."""

    def __init__(self, tokenizer_json: bytes, config: Mapping[str, Any], known: Iterable[Tokenizer] = ()) -> None:
        """`config`: tokenizer_config.json; `known`: of other versions. Raises InvalidRequest where the files can't be
        used, with the reason."""
        self._made_of = content_digest(tokenizer_json)
        self.special_texts = {name: _text(config.get(name)) for name in ("bos_token", "eos_token", "unk_token")}
        """Of bos, eos and unk, as chat templates use them; "" where there is none."""
        self._add_bos: bool | None = config.get("add_bos_token")
        same = next((other for other in known if other._made_of == self._made_of), None)
        if same is not None:
            self._tokenizer, self.bytes, self._longest = same._parsed
            return
        try:
            description = json.loads(tokenizer_json)
            self._tokenizer = tokenizers.Tokenizer.from_buffer(tokenizer_json)
        except Exception as error:  # tokenizers raises plain Exception
            raise InvalidRequest(f"the tokenizer files can't be read: {error}") from None
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        self.bytes = TokenBytes(self._tokenizer, description)
        self._longest = max((len(token.encode()) for token in self._tokenizer.get_vocab()), default=1)

    @property
    def _parsed(self) -> tuple[tokenizers.Tokenizer, TokenBytes, int]:
        """What comes of tokenizer.json alone."""
        return self._tokenizer, self.bytes, self._longest

    def id_of(self, text: str) -> int | None:
        found: int | None = self._tokenizer.token_to_id(text)
        return found

    def at_least(self, text: str) -> int:
        """A lower bound of the tokens that `text` takes: no token covers more than the longest one."""
        return len(text.encode("utf-8", "surrogatepass")) // self._longest

    def encode(self, text: str, *, special: bool) -> tuple[int, ...]:
        """`special`: with what the tokenizer puts before a text (BOS); a rendered chat template has its own.
        Raises as `encode_texts`."""
        (ids,) = encode_texts(self._tokenizer, [text], param="prompt", special=special and self._add_bos is not False)
        bos = self.id_of(self.special_texts["bos_token"])
        if special and self._add_bos and bos is not None and ids[:1] != (bos,):
            return (bos, *ids)
        return ids

    def decode(self, ids: Sequence[int]) -> str:
        """The text of a prompt that was given as ids."""
        return b"".join(map(self.bytes.text, ids)).decode("utf-8", "replace")


def stop_ids(generation_config: Mapping[str, Any], tokenizer: Tokenizer) -> tuple[int, ...]:
    """The ids that end an answer: those of the generation config, and the tokenizer's end of text."""
    configured = generation_config.get("eos_token_id")
    named = [*(configured if isinstance(configured, list) else [configured])]
    named.append(tokenizer.id_of(tokenizer.special_texts["eos_token"]))
    # whatever else a pushed version's file may name ends no answer
    return tuple(sorted({item for item in named if type(item) is int and 0 <= item < 1 << 31}))


def _text(token: Any) -> str:
    """Hugging Face writes a special token as a string or as an object with its content."""
    if isinstance(token, dict):
        token = token.get("content")
    return token if isinstance(token, str) else ""
