"""How many prompt tokens a step takes, so that the answers in it don't wait long for their next token. Pure.

A step's time is about that of its answers and, on top, one for each prompt token. Both are learned from the steps
themselves: what a token costs is taken anew after each, so that the next step's length follows load, context and
whatever else the machine has to do.
"""

from __future__ import annotations

STEP_S = 0.05
"""Of a step that has both: 20 tokens a second for each answer, while a prompt is read beside them."""
INTERRUPTED_S = 0.3
"""Of a step, for reading what interrupted answers had come to: they wait for their next token just as those do that
go on in the step, and have waited longer."""
_LEAST_S = 1e-6
_SHARE = 0.3
"""Of a newly measured value in the one that is believed."""


class Pace:
    """`chunk_tokens`: of a step in which nobody waits; `page_tokens`: a step that reads prompts takes at least a page,
    or they would starve."""

    def __init__(self, page_tokens: int, chunk_tokens: int) -> None:
        self._page_tokens, self._chunk_tokens = page_tokens, chunk_tokens
        self._answers_s = 0.0
        """Of a step of answers alone."""
        self._answer_s: float | None = None
        """Its part of such a step that each answer had: what one more costs is less."""
        self._token_s: float | None = None
        """Of a prompt token, beyond that."""

    @property
    def answers_s(self) -> float:
        """What a step of answers alone takes; 0 before the first."""
        return self._answers_s

    def prompt_tokens(self, answers: int) -> int:
        """The most for the next step, in which so many answers go on."""
        if not answers:
            return self._chunk_tokens
        if self._token_s is None:
            return self._page_tokens
        tokens = int((STEP_S - self._answers_s) / self._token_s)
        return min(max(tokens, self._page_tokens), self._chunk_tokens)

    def interrupted_tokens(self, answers: int) -> int:
        """The same, of answers that were begun elsewhere."""
        if not answers or self._token_s is None:
            return self.prompt_tokens(answers)
        return max(min(int(INTERRUPTED_S / self._token_s), self._chunk_tokens), self.prompt_tokens(answers))

    def answers(self, *, beside_prompts: bool) -> int:
        """The most for the next step, where they are of several tenants: half of its time is for prompts that wait."""
        if not self._answer_s:
            return 1 << 30
        return max(int(STEP_S / self._answer_s / (2 if beside_prompts else 1)), 1)

    def took(self, answers: int, prompt_tokens: int, taken_s: float) -> None:
        """A step is over."""
        if not prompt_tokens:
            self._answers_s = _nearer(self._answers_s or None, taken_s)
            self._answer_s = _nearer(self._answer_s, taken_s / answers) if answers else self._answer_s
            return
        answers_s = self._answers_s if answers else 0.0
        token_s = max(taken_s - answers_s, 0.1 * taken_s, _LEAST_S) / prompt_tokens
        self._token_s = _nearer(self._token_s, token_s)


def _nearer(believed: float | None, measured: float) -> float:
    return measured if believed is None else believed + _SHARE * (measured - believed)
