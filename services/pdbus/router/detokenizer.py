"""Token ids to text as they come, and stop strings that never leak a part of themselves. Pure."""

from __future__ import annotations

import codecs
from collections.abc import Iterable

from pdbus.router.token_bytes import TokenBytes


class Detokenizer:
    """Emits text up to the last whole character. All pieces together equal the whole decoding.

    Bytes that are no UTF-8 become U+FFFD, as many as `bytes.decode(errors="replace")` makes of the whole.
    """

    def __init__(self, tokens: TokenBytes) -> None:
        self._tokens = tokens
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._unfinished = False
        """The decoder holds the beginning of a character."""

    def add(self, token_id: int) -> str:
        if not self._unfinished:
            text = self._tokens.whole(token_id)
            if text is not None:
                return text
        text = self._decoder.decode(self._tokens.text(token_id))
        self._unfinished = bool(self._decoder.getstate()[0])
        return text

    def flush(self) -> str:
        """The answer has ended: what is left of an unfinished character."""
        return self._decoder.decode(b"", final=True)


class StopMatcher:
    """Holds text back for as long as it may turn out to begin a stop string.

    The match that ends first counts, and of those that end together the longest; so the result does not depend on how
    the text was cut into pieces.
    """

    def __init__(self, stops: Iterable[str]) -> None:
        self._stops = tuple(stops)
        self._held = ""
        self.matched = False

    def add(self, text: str) -> str:
        """The text that is now safe to show. After a match: what came before the stop string, then nothing."""
        if self.matched:
            return ""
        if not self._stops:
            return text
        text = self._held + text
        found = [(at + len(stop), at) for stop in self._stops if (at := text.find(stop)) >= 0]
        if found:
            self.matched, self._held = True, ""
            return text[: min(found)[1]]
        keep = max(_overlap(text, stop) for stop in self._stops)
        self._held = text[len(text) - keep :]
        return text[: len(text) - keep]

    def flush(self) -> str:
        """The answer has ended: what was held back was no stop string after all."""
        held, self._held = self._held, ""
        return held


def _overlap(text: str, stop: str) -> int:
    """Length of the longest end of `text` that begins `stop`, short of all of it."""
    for length in range(min(len(stop) - 1, len(text)), 0, -1):
        if text.endswith(stop[:length]):
            return length
    return 0
