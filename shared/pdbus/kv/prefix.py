"""Prefix keys: the identity of a page, and of everything before it.

The keys of a prompt are a hash chain. The parent of its first page is the digest of the scope: all that KV depends on
besides tokens. So every key of the chain holds the scope, and equal keys mean equal tokens from position 0 on, made
from the same weights, settings and numerics, for the same tenant. Only full pages have keys.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Sequence
from dataclasses import dataclass

from pdbus.canonical import Value, digest, encode
from pdbus.kv.format import PageFormat
from pdbus.messages.common import Digest

_SCOPE_SCHEMA = "pdbus.kv.scope/1"
_PAGE_SCHEMA = encode("pdbus.kv.page/1")
_TOKENS_SCHEMA = "pdbus.kv.tokens/1"


@dataclass(frozen=True, slots=True)
class LayerGroup:
    """A run of layers whose KV is keyed together: layers `first` to `last`, both included."""

    first: int
    last: int


def group_starts(layers: int, groups: int) -> tuple[int, ...]:
    """The first layer of each of so many equal runs of layers, but of the lowest."""
    return tuple(sorted({layers * at // groups for at in range(1, groups)} - {0}))


@dataclass(frozen=True)
class PrefixScope:
    """What the KV of a prefix depends on besides its tokens."""

    kv_root: Digest
    """The KV-relevant root of the group (kv/roots.py)."""
    group: LayerGroup
    settings: Value
    """RoPE, attention and every other setting of the model's configuration that its numbers depend on."""
    compute_class: str
    page_format: PageFormat
    """A page's bytes are worthless in another layout."""
    salt: bytes
    """The tenant's: one tenant's prompts never hit another's pages."""

    def digest(self) -> Digest:
        group, layout = [self.group.first, self.group.last], str(self.page_format)
        return digest([_SCOPE_SCHEMA, self.kv_root, group, self.settings, self.compute_class, layout, self.salt])


@dataclass(frozen=True, slots=True)
class PageKey:
    """A full page: its prefix key, and what a hit is compared with (equal digests alone are not trusted)."""

    digest: Digest
    tokens: tuple[int, ...]
    kv_root: Digest
    """So that all pages of a root can be dropped together."""


def page_keys(tokens: Sequence[int], scope: PrefixScope) -> tuple[PageKey, ...]:
    """The keys of all full pages of `tokens`, in order. Raises ValueError for an id outside 0 to 2^32 - 1."""
    return more_keys((), tokens, len(tokens), scope)


def more_keys(keys: tuple[PageKey, ...], tokens: Sequence[int], until: int, scope: PrefixScope) -> tuple[PageKey, ...]:
    """`keys`, those of the first pages of `tokens`, and those of the further pages that are full with `until` tokens.

    So a growing sequence keys each new page without walking its whole prefix again."""
    more: list[PageKey] = []
    parent, size = keys[-1].digest if keys else scope.digest(), scope.page_format.page_tokens
    for start in range(len(keys) * size, until - size + 1, size):
        page = tuple(tokens[start : start + size])
        parent = child_key(parent, page)
        more.append(PageKey(parent, page, scope.kv_root))
    return (*keys, *more) if more else keys


def tokens_digest(tokens: Sequence[int]) -> Digest:
    """What the two ends of a hand-over compare: the tokens whose KV it is. Raises ValueError as `page_keys` does."""
    return digest([_TOKENS_SCHEMA, _packed(tokens)])


def child_key(parent: Digest, tokens: Sequence[int]) -> Digest:
    """The key of the page that holds `tokens` after `parent`: a page's key, or for the first one the scope's digest."""
    packed = _packed(tokens)
    # canonical.digest([schema, parent, packed]) written out: routers and workers do it for every page of every prompt.
    fields = b"".join((_PAGE_SCHEMA, _bytes_of(parent), parent, _bytes_of(packed), packed))
    return hashlib.sha256(b"l" + len(fields).to_bytes(8, "big") + fields).digest()


def _packed(tokens: Sequence[int]) -> bytes:
    try:
        return struct.pack(f">{len(tokens)}I", *tokens)
    except struct.error as error:
        raise ValueError(f"a token id is no unsigned 32-bit integer: {error}") from None


def _bytes_of(field: bytes) -> bytes:
    """What stands before these bytes in the canonical encoding."""
    return b"b" + len(field).to_bytes(8, "big")
