"""The page keys of one prompt, as far as somebody asks for them.

A prompt of 1,536 tokens has 95 keys, each a hash over the one before. Most prompts share a prefix with nobody, and
then one key tells; so they are made one by one while some worker still has them all.
"""

from __future__ import annotations

from collections.abc import Sequence

from pdbus.canonical import digest
from pdbus.kv.prefix import child_key
from pdbus.messages.common import Digest
from pdbus.messages.router import INDEX_KEY_BYTES


class PrefixKeys:
    """Keys cut to the index's length. A worker computes the page with the last token in any case: that one has none."""

    def __init__(self, tokens: Sequence[int], scope: Digest, page_tokens: int, salt: bytes) -> None:
        """`scope`: the digest of the prefix scope, with the tenant's salt."""
        self.page_tokens = page_tokens
        self._salt = salt
        self._tokens = tokens
        self._parent = scope
        self._cuts: list[bytes] = []

    def __len__(self) -> int:
        """Pages that may be found in a cache."""
        return max(len(self._tokens) - 1, 0) // self.page_tokens

    def cut(self, page: int) -> bytes:
        """The key of a page below `len`, as the index has it."""
        while len(self._cuts) <= page:
            start = len(self._cuts) * self.page_tokens
            self._parent = child_key(self._parent, self._tokens[start : start + self.page_tokens])
            self._cuts.append(self._parent[:INDEX_KEY_BYTES])
        return self._cuts[page]

    @property
    def beginning(self) -> bytes:
        """Equal for prompts whose first pages are; of all of a prompt that is shorter than one.

        Also on another version: a worker may have what those layers made of it that are the same in both."""
        return child_key(digest(self._salt), self._tokens[: self.page_tokens])
