"""POST /v1/embeddings."""

from __future__ import annotations

import asyncio
import base64
from collections.abc import Awaitable, Callable
from concurrent.futures import Executor

import msgspec
import numpy as np
from aiohttp import web
from opentelemetry.trace import SpanKind

from pdbus.router.embed_schema import EmbeddingRequest, parse_embedding
from pdbus.router.embeddings import Embedded, Embeddings
from pdbus.router.http_body import read_body
from pdbus.router.http_caller import caller_of, trace_of
from pdbus.router.metrics import RouterMetrics
from pdbus.router.models import FINGERPRINT
from pdbus.router.observe import measured
from pdbus.router.openai_reply import EmbeddingList, EmbeddingOut, EmbeddingUsage
from pdbus.telemetry import embedding_attributes

_FEW_NUMBERS = 50_000
"""More are written in a thread, so that no token of another request waits for them."""


def http_embeddings(
    embeddings: Embeddings, metrics: RouterMetrics, executor: Executor
) -> Callable[[web.Request], Awaitable[web.StreamResponse]]:
    async def handle(http: web.Request) -> web.StreamResponse:
        request = parse_embedding(await read_body(http))
        caller = caller_of(http, request.timeout_s)
        attributes = embedding_attributes(request.model, len(request.inputs), "base64" if request.base64 else "float")
        with measured("embeddings", request.model, attributes, metrics, SpanKind.SERVER, trace_of(http)) as seen:
            answer = await embeddings.answer(request, caller)
            body = await _body(request, answer, executor)
            seen.embedded(answer.tokens, answer.root.hex(), answer.hits)
        headers = {
            "x-request-id": caller.ctx.request_id,
            "X-Feature-Cache": f"hits={answer.hits}, misses={len(answer.vectors) - answer.hits}",
        }
        return web.Response(body=body, content_type="application/json", headers=headers)

    return handle


async def _body(request: EmbeddingRequest, answer: Embedded, executor: Executor) -> bytes:
    if answer.dimensions * len(answer.vectors) <= _FEW_NUMBERS:
        return told(request, answer)
    return await asyncio.get_running_loop().run_in_executor(executor, told, request, answer)


def told(request: EmbeddingRequest, answer: Embedded) -> bytes:
    """The answer in OpenAI's form."""
    model = request.model if request.ref is None else f"{request.model}@{request.ref}"
    usage = EmbeddingUsage(answer.tokens, answer.tokens)
    form = _base64 if request.base64 else _numbers
    data = [EmbeddingOut(index, form(vector)) for index, vector in enumerate(answer.vectors)]
    return msgspec.json.encode(EmbeddingList(data, model, usage, FINGERPRINT + answer.root.hex()))


def _numbers(vector: bytes) -> list[float]:
    numbers: list[float] = np.frombuffer(vector, "<f4").tolist()
    return numbers


def _base64(vector: bytes) -> str:
    return base64.b64encode(vector).decode()
