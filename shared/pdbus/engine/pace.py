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
_BESIDE = 0.1
"""Of a step's time, that others' flood may add to it. The goal is 0.25 of its p99, measured times scatter."""
_FADE = 0.05
_LEAST_VARIANCE = 0.1
_LEAST_ROW = 0.1
"""What a row costs on top is taken to be at least this part of what each row has of a step."""


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
        self._rows = _Line()

    @property
    def answers_s(self) -> float:
        """What a step of answers alone takes; 0 before the first."""
        return self._answers_s

    def prompt_tokens(self, answers: int, *, brief: bool = False) -> int:
        """The most for the next step, in which so many answers go on. `brief`: somebody may wait for its end."""
        if not answers and not brief:
            return self._chunk_tokens
        if self._token_s is None:
            return self._page_tokens
        tokens = int((STEP_S - (self._answers_s if answers else 0.0)) / self._token_s)
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

    def rows_beside(self, answers: int, prompt_tokens: int) -> int:
        """How many answers, or tokens of prompts, may be added to such a step for those who flood it; at least one, or
        they would starve."""
        if not self._answer_s:
            return 1
        row_s = min(max(self._rows.slope, _LEAST_ROW * self._answer_s), self._answer_s)
        step_s = self._rows.at(answers, row_s) + prompt_tokens * (self._token_s or row_s)
        return max(int(_BESIDE * step_s / row_s), 1)

    def took(self, answers: int, prompt_tokens: int, taken_s: float) -> None:
        """A step is over. A few tokens of a prompt beside answers cost about what as many answers do."""
        if not prompt_tokens or (answers and prompt_tokens < self._page_tokens):
            rows = answers + prompt_tokens
            self._answers_s = _nearer(self._answers_s or None, taken_s)
            if rows:
                self._answer_s = _nearer(self._answer_s, taken_s / rows)
                self._rows.add(rows, taken_s)
            return
        answers_s = self._answers_s if answers else 0.0
        token_s = max(taken_s - answers_s, 0.1 * taken_s, _LEAST_S) / prompt_tokens
        self._token_s = _nearer(self._token_s, token_s)


class _Line:
    """What a step takes by its rows, laid through those of late: least squares, the older ones fading."""

    def __init__(self) -> None:
        self._rows = self._taken_s = self._variance = self._covariance = 0.0
        self._slope: float | None = None
        self._any = False

    def add(self, rows: int, taken_s: float) -> None:
        if not self._any:
            self._rows, self._taken_s, self._any = rows, taken_s, True
            return
        by, by_s = rows - self._rows, taken_s - self._taken_s
        self._rows += _FADE * by
        self._taken_s += _FADE * by_s
        self._variance = (1 - _FADE) * (self._variance + _FADE * by * by)
        self._covariance = (1 - _FADE) * (self._covariance + _FADE * by * by_s)
        if self._variance >= _LEAST_VARIANCE:  # of steps alike nothing can be told
            self._slope = self._covariance / self._variance

    @property
    def slope(self) -> float:
        """Of one more row, as far as is known; else all that each has."""
        return self._taken_s / max(self._rows, 1.0) if self._slope is None else self._slope

    def at(self, rows: int, slope: float) -> float:
        return max(self._taken_s + slope * (rows - self._rows), slope * rows)


def _nearer(believed: float | None, measured: float) -> float:
    return measured if believed is None else believed + _SHARE * (measured - believed)
