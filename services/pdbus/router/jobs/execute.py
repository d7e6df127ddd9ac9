"""Answering one job: the request's usual way, again and again while what fails may pass."""

from __future__ import annotations

import asyncio
import dataclasses
import logging
import random
import time
from collections.abc import Callable
from dataclasses import dataclass

import msgspec
from opentelemetry.trace import SpanKind

from pdbus.backoff import backoff_s
from pdbus.context import LONGEST_DEADLINE_S, Deadline, RequestContext
from pdbus.errors import DeadlineExceeded, InvalidRequest, PdbusError, TooLarge
from pdbus.messages.jobs import JOB_PRIORITY, JobEndpoint
from pdbus.router.answer import Answer
from pdbus.router.cache_control import CacheControl
from pdbus.router.embed_schema import EmbeddingRequest, parse_embedding
from pdbus.router.embeddings import Embeddings
from pdbus.router.frontend import Caller, Frontend
from pdbus.router.http_embeddings import told
from pdbus.router.http_errors import describe
from pdbus.router.identity import Identities
from pdbus.router.jobs.room import JobRoom
from pdbus.router.observe import measured, observed
from pdbus.router.openai_schema import Endpoint, GenerateRequest, parse_json
from pdbus.router.telling import whole
from pdbus.telemetry import embedding_attributes

log = logging.getLogger(__name__)

MOST_ANSWER_BYTES = 900_000
"""An answer is kept in one message, of 1 MiB at most."""
_MOST_TRIES = 3
"""At what should not fail: errors of the server, and answers that take longer than any request may."""


@dataclass(frozen=True, slots=True)
class Outcome:
    status_code: int
    data: bytes
    """JSON: the answer, or the error body."""
    tokens: int = 0
    """That were written."""


@dataclass(slots=True)
class Seen:
    """How far an answer is."""

    answer: Answer | None = None

    @property
    def tokens(self) -> int:
        return 0 if self.answer is None else self.answer.completion_tokens


@dataclass(frozen=True, slots=True)
class Asked:
    """One request of a job or a batch."""

    tenant: str
    key_id: str
    endpoint: JobEndpoint
    body: bytes
    name: str
    """Unique; it seeds an answer that is drawn without a seed of its own, so that each try gives the same one."""
    expires_s: float
    priority: int = JOB_PRIORITY


class Executor:
    """Used from one event loop."""

    def __init__(
        self,
        frontend: Frontend,
        embeddings: Embeddings,
        identities: Identities,
        room: JobRoom,
        now: Callable[[], float] = time.time,
    ) -> None:
        self._frontend = frontend
        self._embeddings = embeddings
        self._identities = identities
        self.room = room
        self._now = now
        self._rng = random.Random()  # noqa: S311 - spreads retries

    def check(self, endpoint: JobEndpoint, body: bytes) -> None:
        """Raises InvalidRequest, or NotFound for another model, in the caller's terms."""
        self._frontend.models.check_name(_parse(endpoint, body).model)

    async def run(self, asked: Asked, seen: Seen) -> Outcome:
        """Waits for room, and for what is away, until the job expires."""
        tries = retries = 0
        while True:
            try:
                async with self.room.place():
                    return await self._once(asked, seen)
            except Exception as error:
                tries += not (isinstance(error, PdbusError) and error.retryable)
                failed = error
            if not isinstance(failed, PdbusError):
                log.error("job %s failed", asked.name, exc_info=failed)
            if _final(failed) or tries >= _MOST_TRIES or self._now() >= asked.expires_s:
                return failure(failed)
            retries += 1
            wait_s = max(backoff_s(retries, self._rng), getattr(failed, "retry_after_s", None) or 0.0)
            await asyncio.sleep(wait_s)

    async def _once(self, asked: Asked, seen: Seen) -> Outcome:
        identity = self._identities.by_id(asked.key_id)
        request = _parse(asked.endpoint, asked.body)
        deadline = Deadline.after(request.timeout_s or LONGEST_DEADLINE_S)
        ctx = RequestContext(deadline, tenant=asked.tenant, priority=min(asked.priority, identity.priority_most))
        caller = Caller(ctx, CacheControl(), f"pdbus {asked.name}", identity=identity)
        if isinstance(request, EmbeddingRequest):
            data = await self._embed(request, caller)
        else:
            data = await self._generate(request, caller, seen)
        if len(data) > MOST_ANSWER_BYTES:
            raise TooLarge(f"the answer has {len(data)} bytes; a job's has {MOST_ANSWER_BYTES} at most")
        return Outcome(200, data, seen.tokens)

    async def _generate(self, request: GenerateRequest, caller: Caller, seen: Seen) -> bytes:
        with observed(request, self._frontend.metrics, SpanKind.INTERNAL) as span:
            async with self._frontend.answer(request, caller) as answer:
                seen.answer = answer
                data = msgspec.json.encode(await whole(answer))
                span.whole(answer)
                return data

    async def _embed(self, request: EmbeddingRequest, caller: Caller) -> bytes:
        attributes = embedding_attributes(request.model, len(request.inputs), "float")
        with measured("embeddings", request.model, attributes, self._frontend.metrics, SpanKind.INTERNAL) as span:
            answer = await self._embeddings.answer(request, caller)
            data = await asyncio.get_running_loop().run_in_executor(None, told, request, answer)
            span.embedded(answer.tokens, answer.root.hex(), answer.hits)
            return data


def failure(error: BaseException) -> Outcome:
    """As HTTP tells it."""
    status, body = describe(error)
    return Outcome(status, msgspec.json.encode(body))


def _final(error: Exception) -> bool:
    """Trying again can't help."""
    if not isinstance(error, PdbusError) or type(error) is PdbusError:
        return False
    return not error.retryable and not isinstance(error, DeadlineExceeded)


def _parse(endpoint: JobEndpoint, body: bytes) -> GenerateRequest | EmbeddingRequest:
    if endpoint == "embeddings":
        return parse_embedding(body)
    parsed = parse_json(_GENERATES[endpoint], body)
    if parsed.stream:
        raise InvalidRequest("a job's answer is not streamed", param="stream")
    return dataclasses.replace(parsed, include_usage=False, continuous_usage=False)


_GENERATES: dict[JobEndpoint, Endpoint] = {"chat.completions": "chat.completions", "completions": "completions"}
