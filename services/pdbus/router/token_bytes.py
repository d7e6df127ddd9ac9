"""The bytes that each token id stands for, read from the decoder of a tokenizer.json.

Concatenated, they are the text's UTF-8 before it is decoded, so that decoding goes on token by token in constant time.
Two kinds of tokenizer cover the Llama family: byte-level (GPT-2's table of printable stand-ins for bytes) and
SentencePiece-like (`▁` for a space, `<0x41>` for a byte that has no token).
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import tokenizers

from pdbus.errors import InvalidRequest

_FALLBACK = re.compile(r"<0x([0-9A-Fa-f]{2})>")


class TokenBytes:
    """Maps ids to bytes, each worked out once when it is first asked for."""

    def __init__(self, tokenizer: tokenizers.Tokenizer, description: Mapping[str, Any]) -> None:
        """`description` is the parsed tokenizer.json. Raises InvalidRequest for a decoder of another kind."""
        self._tokenizer = tokenizer
        self._known: dict[int, bytes] = {}
        self._whole: dict[int, str | None] = {}
        self._byte_level = _is_byte_level(description.get("decoder"))
        self._stand_ins = _byte_stand_ins() if self._byte_level else {}
        self.special = frozenset(t["id"] for t in description.get("added_tokens", ()) if t.get("special"))
        """Ids that are no text: they end turns and answers."""

    def __getitem__(self, token_id: int) -> bytes:
        """An id beyond the vocabulary (padding of the embedding) stands for nothing."""
        known = self._known.get(token_id)
        if known is None:
            token = self._tokenizer.id_to_token(token_id)
            known = self._known[token_id] = b"" if token is None else self._bytes(token)
        return known

    def text(self, token_id: int) -> bytes:
        """What the token adds to the text: nothing, if it is special."""
        return b"" if token_id in self.special else self[token_id]

    def whole(self, token_id: int) -> str | None:
        """What the token adds to the text where that is whole characters; None where some of its bytes are parts of
        one. By far the most are whole, and then there is nothing to decode."""
        try:
            return self._whole[token_id]
        except KeyError:
            try:
                text = self.text(token_id).decode()
            except UnicodeDecodeError:
                text = None
            self._whole[token_id] = text
            return text

    def _bytes(self, token: str) -> bytes:
        if self._byte_level:
            try:
                return bytes(self._stand_ins[char] for char in token)
            except KeyError:  # an added token, spelt as it is
                return token.encode()
        fallback = _FALLBACK.fullmatch(token)
        if fallback:
            return bytes.fromhex(fallback[1])
        return token.replace("▁", " ").encode()


def _is_byte_level(decoder: Any) -> bool:
    # The library takes some whose type is no text
    kinds = {str(step.get("type")) if isinstance(step, dict) else "?" for step in _steps(decoder)}
    if "ByteLevel" in kinds:
        return True
    if kinds and kinds <= {"Replace", "ByteFallback", "Fuse", "Strip", "Metaspace"}:
        return False
    raise InvalidRequest(f"tokenizer.json has an unsupported decoder ({', '.join(sorted(kinds)) or 'none'})")


def _steps(decoder: Any) -> list[Any]:
    if not isinstance(decoder, dict):
        return []
    steps = decoder.get("decoders") if decoder.get("type") == "Sequence" else [decoder]
    return steps if isinstance(steps, list) else []


def _byte_stand_ins() -> dict[str, int]:
    """GPT-2's bytes_to_unicode, inverted: printable Latin-1 stands for itself, the rest for 256 and up in order."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    rest = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + i): byte for i, byte in enumerate(rest)}
