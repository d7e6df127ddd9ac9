"""What of a prompt's KV is still to be sent, in pieces of a frame's size: each costs three processes a turn. Pure.

Layers that come one after another, of the same tokens, make one piece as long as they fit into a frame; what is longer
than a frame is cut at page ends.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, replace

from pdbus.bus.bulk_frames import FRAME_BYTES
from pdbus.kv.format import PageFormat


@dataclass(frozen=True, slots=True)
class Piece:
    """KV of some tokens in neighbouring layers, final in the sequence's pages."""

    layer: int
    layers: int
    start: int
    tokens: int


class Pieces:
    def __init__(self, page_format: PageFormat, frame_bytes: int = FRAME_BYTES) -> None:
        self._format = page_format
        self._pages = max(frame_bytes // page_format.layer_bytes, 1)
        """Of all layers of a piece together, at most."""
        self._waiting: deque[Piece] = deque()
        self._known: dict[int, int] = {}
        """Tokens that each layer is known to hold, from the first computed one on."""

    def cached(self, tokens: int) -> None:
        """The first `tokens` tokens are there in all layers: they come before what was computed."""
        computed, self._waiting = self._waiting, deque()
        for layer in range(self._format.layers):
            self._add(layer, 0, tokens)
        self._waiting += computed

    def computed(self, layer: int, start: int, tokens: int) -> None:
        """Of a layer, in the order of the tokens. What is told again, since a pass was given up in its middle, is not
        sent again: it is the same."""
        end = start + tokens
        start = max(start, self._known.get(layer, 0))
        self._known[layer] = max(end, start)
        self._add(layer, start, end - start)

    def take(self, *, all: bool) -> Piece | None:
        """The next one to be sent. One that may still grow only if there is no more to come: `all`."""
        if not self._waiting or not (all or len(self._waiting) > 1 or self._whole(self._waiting[0])):
            return None
        return self._waiting.popleft()

    def _add(self, layer: int, start: int, tokens: int) -> None:
        step = self._pages * self._format.page_tokens
        for at in range(start, start + tokens, step):
            piece = Piece(layer, 1, at, min(step, start + tokens - at))
            last = self._waiting[-1] if self._waiting else None
            if last and self._grows_by(last, piece):
                self._waiting[-1] = replace(last, layers=last.layers + 1)
            else:
                self._waiting.append(piece)

    def _grows_by(self, last: Piece, piece: Piece) -> bool:
        alike = (last.layer + last.layers, last.start, last.tokens) == (piece.layer, piece.start, piece.tokens)
        return alike and not self._whole(last)

    def _whole(self, piece: Piece) -> bool:
        """No layer more fits into it, or there is none."""
        pages = self._format.pages_for(piece.tokens)
        return (piece.layers + 1) * pages > self._pages or piece.layer + piece.layers == self._format.layers
