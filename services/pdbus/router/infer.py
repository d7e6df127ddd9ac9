"""The same requests over the bus: `pd.v1.infer.<model>`."""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import replace

import msgspec
from opentelemetry.trace import SpanKind

from pdbus.context import RequestContext, new_id
from pdbus.messages.router import InferReply, InferRequest
from pdbus.router.cache_control import CacheControl
from pdbus.router.frontend import Caller, Frontend
from pdbus.router.identity import Identities
from pdbus.router.observe import observed
from pdbus.router.openai_schema import parse_builtins
from pdbus.router.telling import chunks, whole


class Infer:
    """The handler of the INFER subject."""

    def __init__(self, frontend: Frontend, identities: Identities) -> None:
        self._frontend, self._identities = frontend, identities

    async def __call__(self, message: InferRequest, ctx: RequestContext) -> AsyncIterator[InferReply]:
        """One reply for each chunk of a streamed answer, or one with all of it. Closing it cancels the request."""
        identity = self._identities.of(ctx.api_key)
        request = parse_builtins(message.endpoint, message.body)
        within = ctx if request.timeout_s is None else ctx.within(request.timeout_s)
        priority = min(ctx.priority, identity.priority_most)
        own = replace(within, request_id=new_id(), tenant=identity.tenant, api_key=None, priority=priority)
        caller = Caller(own, CacheControl(), message.idempotency_key, identity=identity)
        with observed(request, self._frontend.metrics, SpanKind.INTERNAL) as seen:
            async with self._frontend.answer(request, caller) as answer:
                if request.stream:
                    async for batch in chunks(answer):
                        for chunk in batch:
                            yield InferReply(msgspec.to_builtins(chunk))
                else:
                    yield InferReply(msgspec.to_builtins(await whole(answer)))
                seen.whole(answer)
