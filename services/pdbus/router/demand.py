"""What a request will cost, told from its sizes alone: nothing of its text is read."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from pdbus.context import DEFAULT_PRIORITY, RequestContext
from pdbus.keyfile import ANONYMOUS
from pdbus.router.openai_schema import GenerateRequest
from pdbus.router.prompts import DEFAULT_COMPLETION_TOKENS
from pdbus.router.throughput import PROMPT_TOKEN

CHARS_PER_TOKEN = 4
_FIRST_TOKENS = 128.0
_SHARE = 0.05
_MOST_TENANTS = 1024
_ID_BYTES = 8
_MOST_BYTES_PER_TOKEN = 8
"""Of JSON: text has four or so, ids up to seven."""


@dataclass(frozen=True, slots=True)
class Demand:
    """What a request asks for, as far as it can be told without reading its text."""

    tenant: str = ANONYMOUS
    priority: int = DEFAULT_PRIORITY
    cost: float = 1.0
    """Of each choice (router/throughput.py)."""
    size_bytes: int = 0


class Demands:
    """Of one router. What answers come to is learned: many end long before their limit, and who asks for numbers gets
    other lengths than who asks for stories. So it is learned by tenant, and of a new one that of all is believed."""

    def __init__(self) -> None:
        self._of_all = _FIRST_TOKENS
        self._by_tenant: dict[str, float] = {}
        """Those that were answered last, the latest at the end."""

    def answered(self, tenant: str, tokens: float, *, whole: bool) -> None:
        """So many came to a choice."""
        if not whole:
            return
        usual = self._by_tenant.pop(tenant, self._of_all)
        self._by_tenant[tenant] = usual + _SHARE * (tokens - usual)
        self._of_all += _SHARE * (tokens - self._of_all)
        if len(self._by_tenant) > _MOST_TENANTS:
            del self._by_tenant[next(iter(self._by_tenant))]

    def of(self, request: GenerateRequest, ctx: RequestContext) -> Demand:
        texts: list[str | Sequence[int]] = [*request.prompts, *(message.content for message in request.messages)]
        prompt = sum(map(_tokens, texts)) / max(len(request.prompts), 1)
        most = request.max_tokens
        if most is None and request.endpoint == "completions":
            most = DEFAULT_COMPLETION_TOKENS
        usual = max(self._by_tenant.get(ctx.tenant, self._of_all), 1.0)
        answer = usual if most is None else float(most) if request.ignore_eos else min(usual, most)
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
