"""Which pages of running sequences others can find. Pure; the engine's thread alone calls it."""

from __future__ import annotations

from pdbus.engine.sequence import Sequence
from pdbus.engine.sharing import shareable
from pdbus.kv.pages import PageTable
from pdbus.kv.prefix import more_keys
from pdbus.messages.common import Digest


class Publishing:
    """Of one scheduler."""

    def __init__(self, pages: PageTable, page_tokens: int) -> None:
        self._pages, self._page_tokens = pages, page_tokens
        self._computing: set[Digest] = set()
        """Keys of pages that running sequences are about to compute. A hint: a miss costs computing a page twice."""

    def begin(self, sequence: Sequence) -> None:
        """It has its pages, and is about to compute those that it found nowhere."""
        self._computing.update(key.digest for key in sequence.keys[sequence.published :])

    def soon(self, sequence: Sequence) -> bool:
        """A running sequence is about to publish the first page that this one would have to compute."""
        shared = self._pages.matching(shareable(sequence, self._page_tokens))
        return shared < len(sequence.keys) and sequence.keys[shared].digest in self._computing

    def publish(self, sequence: Sequence) -> None:
        """Makes the sequence's full pages findable that are not yet."""
        pages = sequence.hold.pages
        if sequence.scope and sequence.computed >= (len(sequence.keys) + 1) * self._page_tokens:
            sequence.keys = more_keys(sequence.keys, sequence.tokens, sequence.computed, sequence.scope)
            for lower in sequence.lower:
                lower.keys = more_keys(lower.keys, sequence.tokens, sequence.computed, lower.scope)
        full = min(sequence.computed // self._page_tokens, len(sequence.keys))
        for at in range(sequence.published, full):
            key, here = sequence.keys[at], at * self._page_tokens >= sequence.came
            self._pages.publish(pages[at], key, [lower.keys[at] for lower in sequence.lower] if here else ())
            self._computing.discard(key.digest)
        sequence.published = max(sequence.published, full)

    def stop(self, sequence: Sequence) -> None:
        """Publishes no more of the sequence's pages."""
        self._computing.difference_update(key.digest for key in sequence.keys[sequence.published :])
        sequence.keys = sequence.keys[: sequence.published]
        sequence.scope = None
