"""A request for embeddings on its way through the router: queue, version, tokens, feature cache, workers."""

from __future__ import annotations

import asyncio
from concurrent.futures import Executor
from contextlib import AsyncExitStack
from dataclasses import dataclass

from pdbus.errors import InvalidRequest, TooLarge
from pdbus.messages.common import Digest
from pdbus.messages.prefill import MOST_TEXTS
from pdbus.router.admission import Admission
from pdbus.router.demand import texts_demand
from pdbus.router.embed_schema import EmbeddingRequest
from pdbus.router.encoder_version import EncoderVersion
from pdbus.router.encoders import EmbeddingSource, Encoders, Ids
from pdbus.router.features import FeatureCache
from pdbus.router.frontend import Caller
from pdbus.router.identity import Identities
from pdbus.router.metrics import RouterMetrics
from pdbus.router.models import Models
from pdbus.router.quotas import Quotas
from pdbus.router.sessions import named_session
from pdbus.telemetry import Phase

_SHORT_CHARS = 2000


@dataclass(frozen=True, slots=True)
class Embedded:
    """All vectors of one request, of one version."""

    root: Digest
    dimensions: int
    vectors: tuple[bytes, ...]
    """fp32, little-endian."""
    tokens: int
    hits: int
    """Inputs that came from the cache."""


class Embeddings:
    """Used from one event loop."""

    def __init__(
        self,
        models: Models,
        encoders: Encoders,
        features: FeatureCache,
        admission: Admission,
        executor: Executor,
        metrics: RouterMetrics,
        identities: Identities,
        quotas: Quotas,
    ) -> None:
        self._identities = identities
        self._quotas = quotas
        self._models = models
        self._encoders = encoders
        self._features = features
        self._admission = admission
        self._executor = executor
        self._metrics = metrics

    async def answer(self, request: EmbeddingRequest, caller: Caller, most_bytes: int | None = None) -> Embedded:
        """Raises the errors of errors.py in the caller's terms; TooLarge above `most_bytes` of vectors."""
        ctx = caller.ctx
        ctx.deadline.check("the request was taken")
        self._models.check_name(request.model)
        await self._models.check_ref(request.ref, ctx.deadline)
        pieces = -(-len(request.inputs) // MOST_TEXTS)
        async with AsyncExitStack() as stack:
            spending = stack.enter_context(self._quotas.hold(caller.identity, pieces))
            with self._metrics.span(Phase.QUEUE):
                await stack.enter_async_context(
                    self._admission.slot(pieces, ctx.deadline, texts_demand(request.inputs, pieces, ctx))
                )
            root = self._models.resolve(self._ref(request, caller))  # again: it may have moved in the meantime
            version = await self._models.encoder(root, ctx.deadline)
            _check(request, version, most_bytes)
            with self._metrics.span("tokenize") as span:
                texts = await self._tokens(request, version)
                tokens = sum(map(len, texts))
                spending.tokens(tokens)
                span.set_attribute("gen_ai.usage.input_tokens", tokens)
            source = await self._source(version, caller)
            with self._metrics.span("features") as span:
                found = await self._features.get(source, texts, ctx, caller.cache)
                span.set_attribute("pdbus.feature_cache.hits", found.hits)
        vectors = tuple(value for value in found.values if value is not None)
        return Embedded(root, version.config.hidden_size, vectors, tokens, found.hits)

    def _ref(self, request: EmbeddingRequest, caller: Caller) -> str | None:
        """A canary takes its share of the sessions that have a name. Vectors of two versions can't be compared: whoever
        names no session gets all of them from one, whatever the texts."""
        session = named_session(caller.ctx.tenant, caller.session, request.user)
        return request.ref if session is None else self._models.ref_for(request.ref, session)

    async def _source(self, version: EncoderVersion, caller: Caller) -> EmbeddingSource:
        compute_class = await self._encoders.compute_class(version.root, caller.ctx.deadline)
        return EmbeddingSource(
            self._encoders,
            caller.ctx.tenant,
            self._identities.salt(caller.ctx.tenant),
            version.root,
            compute_class,
            version.config.hidden_size,
        )

    async def _tokens(self, request: EmbeddingRequest, version: EncoderVersion) -> list[Ids]:
        """Of each input, checked. Raises InvalidRequest, or TooLarge: nothing is cut."""
        texts = [text for text in request.inputs if isinstance(text, str)]
        encoded: list[Ids] = []
        if sum(map(len, texts)) <= _SHORT_CHARS:
            encoded = version.tokenizer.encode(texts)
        else:
            encoded = await asyncio.get_running_loop().run_in_executor(self._executor, version.tokenizer.encode, texts)
        in_order = iter(encoded)
        found = [next(in_order) if isinstance(text, str) else text for text in request.inputs]
        for at, ids in enumerate(found):
            if len(ids) > version.config.max_tokens:
                reason = f"input {at} has {len(ids)} tokens; this model takes {version.config.max_tokens} at most"
                raise TooLarge(reason, param="input")
            if max(ids, default=0) >= version.config.vocab_size:
                raise InvalidRequest(f"{max(ids)} is no token id of this model", param="input")
        return found


def _check(request: EmbeddingRequest, version: EncoderVersion, most_bytes: int | None) -> None:
    dimensions = version.config.hidden_size
    if request.dimensions not in (None, dimensions):
        reason = f"the vectors of this model have {dimensions} dimensions, and are not cut to {request.dimensions}"
        raise InvalidRequest(reason, param="dimensions")
    size = 4 * dimensions * len(request.inputs)
    if most_bytes is not None and size > most_bytes:
        most = most_bytes // (4 * dimensions)
        raise TooLarge(f"so many vectors don't fit into a message: ask for {most} at a time", param="input")
