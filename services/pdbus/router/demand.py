"""What a request will cost, told from its sizes alone: nothing of its text is read."""

from __future__ import annotations

from collections.abc import Sequence

from pdbus.context import RequestContext
from pdbus.router.admission import Demand
from pdbus.router.openai_schema import GenerateRequest
from pdbus.router.prompts import DEFAULT_COMPLETION_TOKENS
from pdbus.router.throughput import PROMPT_TOKEN

CHARS_PER_TOKEN = 4
_SHARE = 0.05
_ID_BYTES = 8
_MOST_BYTES_PER_TOKEN = 8
"""Of JSON: text has four or so, ids up to seven."""


class Demands:
    """Of one router. What answers come to is learned: many end long before their limit."""

    def __init__(self) -> None:
        self._usual_tokens = 128.0

    def answered(self, tokens: float, *, whole: bool) -> None:
        """So many came to a choice."""
        if whole:
            self._usual_tokens += _SHARE * (tokens - self._usual_tokens)

    def of(self, request: GenerateRequest, ctx: RequestContext) -> Demand:
        texts: list[str | Sequence[int]] = [*request.prompts, *(message.content for message in request.messages)]
        prompt = sum(map(_tokens, texts)) / max(len(request.prompts), 1)
        most = request.max_tokens
        if most is None and request.endpoint == "completions":
            most = DEFAULT_COMPLETION_TOKENS
        answer = self._usual_tokens if most is None else float(most)
        if not request.ignore_eos:
            answer = min(answer, max(self._usual_tokens, 1.0))
        return Demand(ctx.tenant, ctx.priority, prompt * PROMPT_TOKEN + answer, sum(map(_bytes, texts)))


def unread_demand(body_bytes: int, ctx: RequestContext) -> Demand:
    """The least that a body of this size can ask for."""
    return Demand(ctx.tenant, ctx.priority, max(body_bytes / _MOST_BYTES_PER_TOKEN * PROMPT_TOKEN, 1.0), 0)


def texts_demand(texts: Sequence[str | Sequence[int]], choices: int, ctx: RequestContext) -> Demand:
    """Of texts that are only read."""
    return Demand(
        ctx.tenant, ctx.priority, sum(map(_tokens, texts)) * PROMPT_TOKEN / max(choices, 1), sum(map(_bytes, texts))
    )


def _tokens(text: str | Sequence[int]) -> float:
    return len(text) / CHARS_PER_TOKEN if isinstance(text, str) else len(text)


def _bytes(text: str | Sequence[int]) -> int:
    """At least, in memory."""
    return len(text) if isinstance(text, str) else len(text) * _ID_BYTES
