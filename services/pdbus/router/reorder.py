"""Token items into the order of their output indices, each token once. Pure."""

from __future__ import annotations

from dataclasses import replace

from pdbus.messages.router import TokenItem

MOST_HELD = 1024
"""Items held while an earlier one is missing; what is dropped beyond comes again by a resend."""


class InOrder:
    """The reorder buffer of one attempt."""

    def __init__(self, next_index: int) -> None:
        self.next_index = next_index
        """Output index of the first token that is still missing."""
        self._held: dict[int, TokenItem] = {}

    @property
    def gap(self) -> bool:
        """Later items are here, and an earlier one is not."""
        return bool(self._held)

    def add(self, item: TokenItem) -> list[TokenItem]:
        """The items that can be delivered now, without tokens that were delivered before. Duplicates vanish."""
        if item.index > self.next_index:
            if len(self._held) < MOST_HELD:
                known = self._held.get(item.index)
                # Of two cuts of the same run the longer one, or the one that ends it, says more.
                if known is None or (len(known.ids), bool(known.finish)) < (len(item.ids), bool(item.finish)):
                    self._held[item.index] = item
            return []
        ready = self._take(item)
        while ready and self._held and (index := min(self._held)) <= self.next_index:
            ready += self._take(self._held.pop(index))
        return ready

    def _take(self, item: TokenItem) -> list[TokenItem]:
        known = self.next_index - item.index
        if known:
            if known > len(item.ids) or (known == len(item.ids) and not item.finish):
                return []
            item = replace(item, index=self.next_index, ids=item.ids[known:], logprobs=item.logprobs[known:])
        self.next_index += len(item.ids)
        return [item]
