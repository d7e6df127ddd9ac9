"""The client: OpenAI's request bodies and answers over `pd.v1.infer.<model>`; embeddings and features."""

from __future__ import annotations

import random
import time
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any, Literal, TypeVar

from pdbus.backoff import RetryBudget
from pdbus.bus.bus import Bus
from pdbus.bus.bus import connect as connect_bus
from pdbus.caching.feature_key import feature_name
from pdbus.client.embeddings import Embeddings, embed_all
from pdbus.client.jobs import Jobs
from pdbus.client.resume import Object, Resumed
from pdbus.client.retries import Retries
from pdbus.client.weights import Weights
from pdbus.context import DEFAULT_PRIORITY, Deadline, RequestContext, new_id
from pdbus.errors import Corrupt, PdbusError
from pdbus.messages.features import FeaturesReply, FeaturesRequest
from pdbus.messages.router import EmbedReply, EmbedRequest, InferRequest
from pdbus.messages.workers import Invalidated
from pdbus.nats_access import NatsAccess
from pdbus.subjects import EMBED, FEATURES, INFER, INVALIDATED, To

Q = TypeVar("Q")
R = TypeVar("R")
Endpoint = Literal["chat.completions", "completions"]

DEFAULT_TIMEOUT_S = 120.0


class Client:
    """Asks whichever router answers for `model` (NAME, NAME@REF or NAME@ROOT).

    What can be retried is, with jittered backoff and within one budget, until the request's timeout; under
    one idempotency key, so that a repeated request gives the same answer.

    Bodies and answers are those of OpenAI's API, as dictionaries; `fields` are the body's other fields. All methods
    raise the errors of pdbus.errors.
    """

    def __init__(
        self,
        bus: Bus,
        model: str,
        *,
        timeout_s: float = DEFAULT_TIMEOUT_S,
        api_key: str | None = None,
        priority: int = DEFAULT_PRIORITY,
    ) -> None:
        """`priority`: of all that it asks for, 0 to 9; the key may limit it."""
        self._priority = priority
        self._bus = bus
        self._api_key = api_key
        self._model = model
        self._name = model.partition("@")[0]
        self._to = INFER(model=self._name)
        self._timeout_s = timeout_s
        self._rng = random.Random()  # noqa: S311 - spreads retries
        self._budget = RetryBudget(time.monotonic())
        self.weights = Weights(bus, self._name)
        """Updates and versions of the model. `connect` ends what it starts; else its `close` does."""
        self.jobs = Jobs(bus, model, self._context, self._call, self._retries)
        """Work that must not be lost."""

    async def chat(self, messages: Sequence[Object], *, timeout_s: float | None = None, **fields: Any) -> Object:
        """The whole answer, a `chat.completion`."""
        return await self._whole("chat.completions", {"messages": list(messages), **fields}, timeout_s)

    async def complete(
        self, prompt: str | Sequence[int] | Sequence[str], *, timeout_s: float | None = None, **fields: Any
    ) -> Object:
        """The whole answer, a `text_completion`."""
        return await self._whole("completions", {"prompt": _plain(prompt), **fields}, timeout_s)

    @asynccontextmanager
    async def chat_stream(
        self, messages: Sequence[Object], *, timeout_s: float | None = None, **fields: Any
    ) -> AsyncIterator[AsyncIterator[Object]]:
        """The answer as chunks, each once, also when the router dies in mid-answer. Leaving the scope cancels it."""
        async with self._stream("chat.completions", {"messages": list(messages), **fields}, timeout_s) as chunks:
            yield chunks

    @asynccontextmanager
    async def complete_stream(
        self, prompt: str | Sequence[int] | Sequence[str], *, timeout_s: float | None = None, **fields: Any
    ) -> AsyncIterator[AsyncIterator[Object]]:
        """As `chat_stream`, for a completion."""
        async with self._stream("completions", {"prompt": _plain(prompt), **fields}, timeout_s) as chunks:
            yield chunks

    async def embed(
        self,
        inputs: Sequence[str | Sequence[int]],
        *,
        ref: str | None = None,
        cache_control: str = "",
        session: str | None = None,
        timeout_s: float | None = None,
    ) -> Embeddings:
        """The vectors of texts (or of token ids, taken as they are), however many, all of one version.

        `ref`: over the one of `connect`. `cache_control`: no-store, no-cache or max-age=SECONDS. `session`: names what
        belongs together; it is served by one version while a canary runs, which takes no part of the rest."""
        ctx = self._context(timeout_s)
        wanted = ref or self._model.partition("@")[2] or None

        async def ask(request: EmbedRequest) -> EmbedReply:
            return await self._call(EMBED(model=self._name), request, ctx)

        return await embed_all(ask, inputs, wanted, cache_control, session)

    async def features(
        self, keys: Sequence[str], *, cache_control: str = "", timeout_s: float | None = None
    ) -> FeaturesReply:
        """What the service of the routers' PDBUS_FEATURE_SUBJECT has on these items, from the cache where it is there:
        a value for each, all of one version of that service."""
        ctx = self._context(timeout_s)
        return await self._call(FEATURES(model=self._name), FeaturesRequest(tuple(keys), cache_control), ctx)

    async def features_changed(self, keys: Sequence[str]) -> None:
        """To be called once that service answers anew for these items, where its version stays: what is cached of them
        goes everywhere, and nothing that was asked for before comes back."""
        for key in keys:
            entry = Invalidated(self._name, "delete_name", name=feature_name(self._name, key))
            await self._bus.logs.append(INVALIDATED(), entry)

    def _context(self, timeout_s: float | None) -> RequestContext:
        return RequestContext(
            Deadline.after(timeout_s or self._timeout_s), api_key=self._api_key, priority=self._priority
        )

    def _retries(self, ctx: RequestContext) -> Retries:
        return Retries(self._budget, self._rng, ctx)

    async def _call(self, to: To[Q, R], request: Q, ctx: RequestContext) -> R:
        retries = self._retries(ctx)
        while True:
            try:
                return await self._bus.call(to, request, ctx)
            except PdbusError as error:
                await retries.failed(error)

    async def _whole(self, endpoint: Endpoint, body: Object, timeout_s: float | None) -> Object:
        ctx = self._context(timeout_s)
        request = InferRequest(endpoint, {"model": self._model, **body, "stream": False}, new_id())
        retries = self._retries(ctx)
        while True:
            try:
                async with self._bus.stream(self._to, request, ctx) as replies:
                    async for reply in replies:
                        return reply.data
                raise Corrupt("the router ended without an answer")
            except PdbusError as error:
                await retries.failed(error)

    @asynccontextmanager
    async def _stream(
        self, endpoint: Endpoint, body: Object, timeout_s: float | None
    ) -> AsyncIterator[AsyncIterator[Object]]:
        ctx = self._context(timeout_s)
        chunks = self._chunks(endpoint, {"model": self._model, **body, "stream": True}, ctx)
        try:
            yield chunks
        finally:
            await chunks.aclose()

    async def _chunks(self, endpoint: Endpoint, body: Object, ctx: RequestContext) -> AsyncGenerator[Object, None]:
        key, resumed, retries = new_id(), Resumed(), self._retries(ctx)
        while True:
            if resumed.fingerprint is not None:  # the rest has to come from the version that the beginning came from
                body = {**body, "model": f"{self._name}@{resumed.fingerprint}"}
            request = InferRequest(endpoint, body, key)
            resumed.begin()
            try:
                async with self._bus.stream(self._to, request, ctx) as replies:
                    async for reply in replies:
                        new = resumed.new(reply.data)
                        if new is not None:
                            retries.progressed()
                            yield new
                return
            except PdbusError as error:
                await retries.failed(error)


@asynccontextmanager
async def connect(
    nats_url: str,
    model: str,
    *,
    timeout_s: float = DEFAULT_TIMEOUT_S,
    api_key: str | None = None,
    access: NatsAccess | None = None,
    priority: int = DEFAULT_PRIORITY,
) -> AsyncIterator[Client]:
    """A client with a connection of its own.

    `api_key`: of `pdbus keys add`, where the routers ask for one; `access`: of `pdbus keys nats`, where NATS does.
    Raises Unavailable where no NATS server answers within `timeout_s`, Unauthorized where it does not know `access`."""
    async with connect_bus(nats_url, name=f"pdbus client of {model}", wait_s=timeout_s, access=access) as bus:
        client = Client(bus, model, timeout_s=timeout_s, api_key=api_key, priority=priority)
        try:
            yield client
        finally:
            await client.weights.close()


def _plain(prompt: str | Sequence[int] | Sequence[str]) -> str | list[Any]:
    return prompt if isinstance(prompt, str) else list(prompt)
