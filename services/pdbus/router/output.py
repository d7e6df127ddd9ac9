"""One choice's token ids turned into what its reader sees, in the order of arrival. Pure."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

from pdbus.messages.router import TokenLogprob
from pdbus.router.detokenizer import Detokenizer, StopMatcher
from pdbus.router.token_bytes import TokenBytes

Reason = Literal["stop", "length"]


@dataclass(frozen=True, slots=True)
class ShownToken:
    """A token whose log-probability was asked for."""

    id: int
    logprob: TokenLogprob | None
    """None: the first token of an echoed prompt, which nothing precedes."""
    offset: int
    """Where its text begins, in characters of the choice's text."""


@dataclass(slots=True)
class Delta:
    """What is new of one choice. Nobody changes it; but frozen, it would take eight times as long to make."""

    choice: int
    text: str
    tokens: tuple[ShownToken, ...] = ()
    finish: Reason | None = None
    ids: tuple[int, ...] = ()
    """The answer's tokens since the last delta; their text may be held back yet."""


class ChoiceOutput:
    """Takes tokens in order, each once, and tells `emit` what can be shown.

    Nothing is shown that may yet become part of a stop string, neither as text nor as the text of a listed token.
    """

    def __init__(
        self,
        choice: int,
        tokens: TokenBytes,
        emit: Callable[[Delta], None],
        *,
        stops: Sequence[str] = (),
        stop_ids: frozenset[int] = frozenset(),
        most_tokens: int,
        logprobs: bool = False,
        echo: Sequence[int] | None = None,
        echo_text: str = "",
    ) -> None:
        """`echo`: the prompt's ids, if it is shown before the answer; `echo_text` is its text."""
        self.choice = choice
        self.ids: list[int] = []
        self.logprobs: list[TokenLogprob] = []
        self.finish: Reason | None = None
        self.cached_tokens = 0
        """Prompt tokens that the first attempt found in a cache."""
        self._emit = emit
        self._detokenizer = Detokenizer(tokens)
        self._stops = StopMatcher(stops)
        self._stop_ids = stop_ids
        self._most_tokens = most_tokens
        self._listed = logprobs
        self._tokens = tokens
        self._echo = echo
        self._echo_text = echo_text
        self.prompt_logprobs: tuple[TokenLogprob, ...] | None = None
        self._read = self._shown = self._told = 0
        self._pending: deque[tuple[int, ShownToken]] = deque()  # with where the token's text ends

    @property
    def prompt_known(self) -> bool:
        """The prompt's log-probabilities have come (they come with the first token, if at all)."""
        return self.prompt_logprobs is not None

    def begin(self) -> None:
        """Shows an echoed prompt that needs no log-probabilities."""
        if self._echo is not None and not self._listed:
            self._read = self._shown = len(self._echo_text)
            self._emit(Delta(self.choice, self._echo_text))

    def prompt(self, logprobs: tuple[TokenLogprob, ...]) -> None:
        """The log-probabilities of the echoed prompt's tokens after the first."""
        if self._echo is None or self.prompt_known:
            return
        self.prompt_logprobs = logprobs
        detokenizer, offset, shown = Detokenizer(self._tokens), 0, []
        for token_id, logprob in zip(self._echo, (None, *logprobs), strict=True):
            shown.append(ShownToken(token_id, logprob, offset))
            offset += len(detokenizer.add(token_id))
        self._read = self._shown = len(self._echo_text)
        self._emit(Delta(self.choice, self._echo_text, tuple(shown)))

    def add(self, ids: Sequence[int], logprobs: Sequence[TokenLogprob], finish: Reason | None) -> bool:
        """Returns whether the answer has ended: by `finish`, a stop string or id, or its length."""
        text = ""
        for i, token_id in enumerate(ids):
            if token_id in self._stop_ids:
                finish = "stop"
                break
            self.ids.append(token_id)
            piece = self._detokenizer.add(token_id)
            if self._listed:
                self.logprobs.append(logprobs[i])
                shown = ShownToken(token_id, logprobs[i], self._read)
                self._pending.append((self._read + len(piece), shown))
            self._read += len(piece)
            text += self._stops.add(piece)
            if self._stops.matched:
                finish = "stop"
                break
            if len(self.ids) >= self._most_tokens:
                finish = finish or "length"
                break
        if finish and not self._stops.matched:
            text += self._end()
            if self._stops.matched:
                finish = "stop"
        self.finish = finish
        ready = self._release(text)
        if text or ready or finish:
            self._emit(Delta(self.choice, text, ready, finish, tuple(self.ids[self._told :])))
            self._told = len(self.ids)
        return finish is not None

    def _end(self) -> str:
        rest = self._detokenizer.flush()
        self._read += len(rest)
        safe = self._stops.add(rest)
        return safe if self._stops.matched else safe + self._stops.flush()

    def _release(self, text: str) -> tuple[ShownToken, ...]:
        self._shown += len(text)
        if not self._pending:
            return ()
        ready: list[ShownToken] = []
        while self._pending:
            end, token = self._pending[0]
            # Within the text; or, at the end of the answer, at least begun in it.
            if end > self._shown and not (self.finish and token.offset < self._shown):
                break
            ready.append(token)
            self._pending.popleft()
        if self.finish:
            self._pending.clear()
        return tuple(ready)
