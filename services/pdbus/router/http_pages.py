"""What a router tells of itself: models, health, metrics, and how to ask it."""

from __future__ import annotations

import time
from collections.abc import Callable

import msgspec
from aiohttp import web

from pdbus.errors import NotFound
from pdbus.router.models import DEFAULT_REF, Models
from pdbus.router.openai_reply import Health, ModelCard, ModelList
from pdbus.router.openapi import document
from pdbus.telemetry import PROMETHEUS_CONTENT_TYPE, prometheus_text

OPEN_PAGES = frozenset({"/healthz", "/readyz", "/health", "/metrics", "/openapi.json"})
"""Asked for by load balancers and collectors, which have no key: nothing of a tenant, a prompt or an answer is there.
Metrics tell of load by model; who must not see that is kept from the port, as everybody is by default (loopback)."""


class Pages:
    """`why_not_ready` returns "" while requests can be served, else the reason.
    `jobs`: whether jobs, batches and files are served."""

    def __init__(self, models: Models, why_not_ready: Callable[[], str], *, jobs: bool) -> None:
        self._models = models
        self._why_not_ready = why_not_ready
        self._created = int(time.time())
        self._document = msgspec.json.encode(document(jobs=jobs))

    def routes(self) -> list[web.RouteDef]:
        return [
            web.get("/v1/models", self._list),
            web.get("/v1/models/{name}", self._model),
            web.get("/healthz", self._alive),
            web.get("/readyz", self._ready),
            web.get("/health", self._ready),
            web.get("/metrics", self._metrics),
            web.get("/openapi.json", self._openapi),
        ]

    async def _list(self, _: web.Request) -> web.Response:
        return _json(ModelList(data=self._cards()))

    async def _model(self, http: web.Request) -> web.Response:
        name = http.match_info["name"]
        found = next((card for card in self._cards() if card.id == name), None)
        if found is None:
            raise NotFound(f"the model {name[:128]!r} does not exist here", param="model")
        return _json(found)

    async def _alive(self, _: web.Request) -> web.Response:
        """The event loop turns; nothing more."""
        return _json(Health(status="ok"))

    async def _ready(self, _: web.Request) -> web.Response:
        reason = self._why_not_ready()
        if reason:
            return _json(Health(status="unavailable", detail=reason), status=503)
        return _json(Health(status="ok"))

    async def _metrics(self, _: web.Request) -> web.Response:
        return web.Response(body=prometheus_text(), headers={"Content-Type": PROMETHEUS_CONTENT_TYPE})

    async def _openapi(self, _: web.Request) -> web.Response:
        return web.Response(body=self._document, content_type="application/json")

    def _cards(self) -> list[ModelCard]:
        """The model by its plain name first, then by each ref."""
        model, refs = self._models.model, self._models.refs
        names = ([model] if DEFAULT_REF in refs else []) + [f"{model}@{ref}" for ref in sorted(refs)]
        roots = ([refs[DEFAULT_REF]] if DEFAULT_REF in refs else []) + [refs[ref] for ref in sorted(refs)]
        return [
            ModelCard(id=name, created=self._created, root=root.hex()) for name, root in zip(names, roots, strict=True)
        ]


def _json(content: msgspec.Struct, status: int = 200) -> web.Response:
    return web.Response(status=status, body=msgspec.json.encode(content), content_type="application/json")
