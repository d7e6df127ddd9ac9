"""The OpenAPI 3.1 document, made from the declarations that requests are checked against and answers are told in."""

from __future__ import annotations

import importlib.metadata
from typing import Any

import msgspec

from pdbus.router.http_errors import ErrorBody
from pdbus.router.jobs.openapi_jobs import JOB_TYPES, job_paths
from pdbus.router.openai_body import ChatBody, CompletionBody, EmbeddingBody
from pdbus.router.openai_reply import (
    ChatChunk,
    ChatCompletion,
    Completion,
    CompletionChunk,
    EmbeddingList,
    Health,
    ModelCard,
    ModelList,
)

_TYPES: tuple[type[msgspec.Struct], ...] = (
    ChatBody, ChatCompletion, ChatChunk, CompletionBody, Completion, CompletionChunk,
    EmbeddingBody, EmbeddingList, ModelList, ModelCard, Health, ErrorBody,
)  # fmt: skip
_ERRORS = {
    "400": "The request can't be served as it is; `param` names the field",
    "404": "No such model, version, ref, job, batch or file",
    "408": "The body did not arrive in time",
    "409": "The idempotency key was used for another request, or it has ended already",
    "413": "The body is too large",
    "415": "The body has a Content-Encoding other than gzip",
    "429": "Too much waits, or is stored (quota_exceeded); try again after Retry-After seconds",
    "500": "An error of the server",
    "502": "Workers sent what can't be trusted",
    "503": "Nothing can serve this now; try again",
    "504": "The deadline passed",
}


def document(*, jobs: bool) -> dict[str, Any]:
    """As plain data. `jobs`: whether there are jobs, batches and files."""
    types = (*_TYPES, *JOB_TYPES) if jobs else _TYPES
    schemas, components = msgspec.json.schema_components(types, ref_template="#/components/schemas/{name}")
    ref = dict(zip(types, schemas, strict=True))
    return {
        "openapi": "3.1.0",
        "info": {"title": "pdbus", "version": importlib.metadata.version("pdbus")},
        "paths": {
            "/v1/chat/completions": {"post": _generation("chat", ref, ChatBody, ChatCompletion, ChatChunk)},
            "/v1/completions": {"post": _generation("completion", ref, CompletionBody, Completion, CompletionChunk)},
            "/v1/embeddings": {"post": _embedding(ref)},
            "/v1/models": {"get": _get("models", "The model, by its name and by each of its refs", ref[ModelList])},
            "/v1/models/{name}": {
                "get": _get("model", "One of them", ref[ModelCard], "404")
                | {"parameters": [_parameter("name", "path", {"type": "string"}, "As the list names it")]}
            },
            **(job_paths(ref) if jobs else {}),
            "/healthz": {"get": _get("alive", "The process lives", ref[Health])},
            "/readyz": {"get": _get("ready", "Requests can be served", ref[Health], not_ready=ref[Health])},
            "/health": {"get": _get("health", "As /readyz", ref[Health], not_ready=ref[Health])},
            "/metrics": {"get": _get("metrics", "Prometheus metrics", {"type": "string"}, media="text/plain")},
            "/openapi.json": {"get": _get("openapi", "This document", {"type": "object"})},
        },
        "components": {
            "schemas": components,
            "responses": {status: _error(text, ref[ErrorBody]) for status, text in _ERRORS.items()},
        },
    }


def _generation(
    name: str, ref: dict[type[msgspec.Struct], Any], body: type[Any], whole: type[Any], chunk: type[Any]
) -> dict[str, Any]:
    events = "Server-sent events: each `data` is a chunk, or an error that ends the stream; the last one is [DONE]"
    idempotency = _parameter(
        "Idempotency-Key",
        "header",
        {"type": "string", "minLength": 1, "maxLength": 255},
        "The same request under the same key gets the same answer",
    )
    return {
        "operationId": name,
        "parameters": [*_HEADERS, idempotency],
        "requestBody": {"required": True, "content": {"application/json": {"schema": ref[body]}}},
        "responses": {
            "200": {
                "description": f"The answer. {events}",
                "content": {
                    "application/json": {"schema": ref[whole]},
                    "text/event-stream": {"schema": {"type": "string", "contentSchema": ref[chunk]}},
                },
            },
            **{status: {"$ref": f"#/components/responses/{status}"} for status in _ERRORS},
        },
    }


def _embedding(ref: dict[type[msgspec.Struct], Any]) -> dict[str, Any]:
    return {
        "operationId": "embedding",
        "parameters": _HEADERS,
        "requestBody": {"required": True, "content": {"application/json": {"schema": ref[EmbeddingBody]}}},
        "responses": {
            "200": {
                "description": "A vector for each input, in order, all of one version",
                "headers": {"X-Feature-Cache": {"schema": {"type": "string"}, "description": "hits=N, misses=N"}},
                "content": {"application/json": {"schema": ref[EmbeddingList]}},
            },
            **{status: {"$ref": f"#/components/responses/{status}"} for status in _ERRORS},
        },
    }


def _get(
    name: str, text: str, schema: Any, *errors: str, media: str = "application/json", not_ready: Any = None
) -> dict[str, Any]:
    responses: dict[str, Any] = {"200": {"description": text, "content": {media: {"schema": schema}}}}
    responses |= {status: {"$ref": f"#/components/responses/{status}"} for status in errors}
    if not_ready is not None:
        responses["503"] = {"description": "Not now", "content": {media: {"schema": not_ready}}}
    return {"operationId": name, "responses": responses}


def _error(text: str, schema: Any) -> dict[str, Any]:
    return {"description": text, "content": {"application/json": {"schema": schema}}}


def _parameter(name: str, where: str, schema: dict[str, Any], text: str) -> dict[str, Any]:
    return {"name": name, "in": where, "required": where == "path", "schema": schema, "description": text}


_HEADERS = [
    _parameter(
        "X-Request-Timeout-Ms",
        "header",
        {"type": "integer", "minimum": 1, "maximum": 999_999_999},
        "When the request is given up (120 s unless told; at most 600 s)",
    ),
    _parameter("Cache-Control", "header", {"type": "string"}, "no-store, no-cache, max-age=SECONDS"),
    _parameter(
        "X-Priority",
        "header",
        {"type": "integer", "minimum": 0, "maximum": 9},
        "Higher ones go first (5 unless told; a key may have a lower limit)",
    ),
]
