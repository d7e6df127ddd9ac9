"""What a sequence that is admitted finds of itself in pages that are there. The engine's thread alone calls it."""

from __future__ import annotations

from pdbus.engine.sequence import Sequence
from pdbus.kv.page_hold import PageHold
from pdbus.kv.pages import PageTable
from pdbus.kv.prefix import PageKey


def shareable(sequence: Sequence, page_tokens: int) -> tuple[PageKey, ...]:
    """Keys of its first pages, less the one with the last token: that is computed in any case, for its logits."""
    return sequence.keys[: (len(sequence.tokens) - 1) // page_tokens]


def match_lower(sequence: Sequence, pages: PageTable, page_tokens: int, shared: int, sources: PageHold) -> int:
    """Takes pages that are the same as the sequence's next ones, after `shared` of them, below some layer. Returns that
    layer: the one by which most is saved."""
    most = len(shareable(sequence, page_tokens))
    known = [(one.layer, one.keys[shared:most]) for one in sequence.lower]
    layer, keys = max(known, key=lambda one: one[0] * pages.matching_lower(one[1]), default=(0, ()))
    sources.match_lower(keys)
    return layer
