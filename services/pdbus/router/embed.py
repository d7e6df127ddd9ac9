"""The same requests over the bus: `pd.v1.embed.<model>`."""

from __future__ import annotations

from dataclasses import replace

from opentelemetry.trace import SpanKind

from pdbus.context import RequestContext, new_id
from pdbus.messages.router import EmbedReply, EmbedRequest
from pdbus.router.cache_control import CacheControl
from pdbus.router.embed_schema import EmbeddingRequest
from pdbus.router.embeddings import Embeddings
from pdbus.router.frontend import Caller
from pdbus.router.identity import Identities
from pdbus.router.metrics import RouterMetrics
from pdbus.router.observe import measured
from pdbus.telemetry import embedding_attributes

MOST_BYTES = 900_000
"""Of the vectors in one reply; the server's limit for a message is 1 MiB."""


class EmbedHandler:
    """The handler of the EMBED subject."""

    def __init__(self, embeddings: Embeddings, metrics: RouterMetrics, model: str, identities: Identities) -> None:
        self._embeddings, self._metrics, self._model = embeddings, metrics, model
        self._identities = identities

    async def __call__(self, message: EmbedRequest, ctx: RequestContext) -> EmbedReply:
        identity = self._identities.of(ctx.api_key)
        request = EmbeddingRequest(model=self._model, ref=message.ref, inputs=message.input)
        cache = CacheControl.parse(message.cache_control)
        priority = min(ctx.priority, identity.priority_most)
        own = replace(ctx, request_id=new_id(), tenant=identity.tenant, api_key=None, priority=priority)
        caller = Caller(own, cache, session=message.session, identity=identity)
        attributes = embedding_attributes(self._model, len(request.inputs), "fp32")
        with measured("embeddings", self._model, attributes, self._metrics, SpanKind.INTERNAL) as seen:
            answer = await self._embeddings.answer(request, caller, MOST_BYTES)
            seen.embedded(answer.tokens, answer.root.hex(), answer.hits)
        return EmbedReply(answer.root, answer.dimensions, b"".join(answer.vectors), answer.tokens, answer.hits)
