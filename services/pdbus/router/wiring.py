"""How the parts of a router hang together: the one place that makes them."""

from __future__ import annotations

import random
from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from typing import Any

from pdbus.bus.bus import Bus
from pdbus.bus.presence import Fleet
from pdbus.bus.serving import Registration
from pdbus.errors import PdbusError
from pdbus.messages.router import InferReply, InferRequest
from pdbus.router.admission import Admission
from pdbus.router.cancels import Cancels
from pdbus.router.embed import EmbedHandler
from pdbus.router.embeddings import Embeddings
from pdbus.router.encoders import Encoders
from pdbus.router.feature_source import Entries
from pdbus.router.feature_subject import FeaturesHandler, SubjectSource
from pdbus.router.features import FeatureCache
from pdbus.router.frontend import Frontend
from pdbus.router.http import HttpServer, serve_http
from pdbus.router.http_embeddings import http_embeddings
from pdbus.router.http_pages import Pages
from pdbus.router.identity import Identities
from pdbus.router.infer import Infer
from pdbus.router.jobs.service import JobService
from pdbus.router.kv_follower import KvFollower
from pdbus.router.metrics import RouterMetrics
from pdbus.router.models import Follower, Models, Reader
from pdbus.router.quotas import Quotas
from pdbus.router.results import Results, Ring
from pdbus.router.settings import RouterSettings
from pdbus.router.tokens import TokenHub
from pdbus.router.workers import Workers
from pdbus.subjects import EMBED, FEATURES, INFER, REF_STATS

_THREADS = 2
"""For long prompts and vocabularies."""


@dataclass(frozen=True)
class Router:
    """A router at work."""

    frontend: Frontend
    hub: TokenHub
    cancels: Cancels
    workers: Workers
    index: KvFollower
    http: HttpServer
    infer: Registration[InferRequest, InferReply]
    features: FeatureCache
    embed: tuple[Registration[Any, Any], ...]
    """Embeddings and features on the bus."""
    jobs: JobService | None
    """None on a bus without logs."""

    async def stop_intake(self) -> None:
        """Requests on open connections are refused retryably from now on; running ones and their streams go on."""
        if self.jobs is not None:
            await self.jobs.stop_intake()
        self.frontend.admission.close()
        for registration in (self.infer, *self.embed):
            await registration.stop()
        await self.http.stop_listening()

    def held(self) -> dict[str, int]:
        """As Service.held."""
        return self.frontend.held() | {
            "attempts": self.hub.listening_for,
            "bookings": self.workers.bookings,
            "cancels": self.cancels.open,
            "flights": self.features.flights,
            "feature_writes": self.features.filling,
        }

    def why_not_ready(self) -> str:
        """ "" while requests by the default ref can be served."""
        return why_not_ready(self.frontend.models, self.workers)


@asynccontextmanager
async def router(
    settings: RouterSettings, bus: Bus, fleet: Fleet, follower: Follower, reader: Reader, ring: Ring, entries: Entries
) -> AsyncIterator[Router]:
    """Serves until it is left. Raises OSError where the HTTP address can't be had."""
    async with AsyncExitStack() as stack:
        executor = stack.enter_context(ThreadPoolExecutor(_THREADS, thread_name_prefix="router"))
        metrics = RouterMetrics(settings.model, settings.id)
        rng = random.Random()  # noqa: S311 - breaks ties and spreads retries
        index = await stack.enter_async_context(KvFollower(bus, fleet, settings.model, rng))
        workers = Workers(fleet, settings.model, index.matching, rng)
        cancels = Cancels(bus, settings.id, workers.gone)
        models = await stack.enter_async_context(Models(settings.model, follower, reader, executor))
        hub = await stack.enter_async_context(TokenHub(bus, settings.id, workers, cancels, metrics))
        stack.push_async_callback(cancels.close)  # before the hub, by which the answers come
        admission = Admission(
            settings.max_inflight,
            settings.max_queued,
            most_bytes=settings.max_queued_bytes,
            fleet_slots=workers.slots,
        )
        results = Results(ring, settings.result_ttl_s)
        identities, quotas = Identities(settings.keys_file), Quotas()
        frontend = Frontend(bus, settings.id, models, hub, results, admission, executor, metrics, identities, quotas)
        features = await stack.enter_async_context(FeatureCache(entries, settings.feature_ttl_s))
        encoders = Encoders(bus, workers, settings.model, rng)
        embeddings = Embeddings(models, encoders, features, admission, executor, metrics, identities, quotas)
        most = settings.max_inflight + settings.max_queued
        infer = await bus.serve(INFER(model=settings.model), Infer(frontend, identities), limit=most)
        embed = await _serve_features(
            settings,
            bus,
            EmbedHandler(embeddings, metrics, settings.model, identities),
            features,
            identities,
            quotas,
        )
        refs = await bus.serve(REF_STATS(router=settings.id), metrics.refs.tell)
        for registration in (infer, *embed, refs):
            await stack.enter_async_context(registration)
        jobs = None
        if bus.durable:
            jobs = await stack.enter_async_context(JobService(bus, frontend, embeddings, identities, quotas, settings))
        pages = Pages(models, lambda: why_not_ready(models, workers), jobs=jobs is not None)
        http = await stack.enter_async_context(
            serve_http(
                frontend,
                http_embeddings(embeddings, metrics, executor),
                [*pages.routes(), *(jobs.routes() if jobs is not None else ())],
                identities,
                settings,
            )
        )
        yield Router(frontend, hub, cancels, workers, index, http, infer, features, embed, jobs)


async def _serve_features(
    settings: RouterSettings,
    bus: Bus,
    embed: EmbedHandler,
    features: FeatureCache,
    identities: Identities,
    quotas: Quotas,
) -> tuple[Registration[Any, Any], ...]:
    """Embeddings, and the features of a caller's own service; to be ended by the caller."""
    model, most = settings.model, settings.max_inflight + settings.max_queued
    source = SubjectSource(bus, model, settings.feature_subject) if settings.feature_subject else None
    return (
        await bus.serve(EMBED(model=model), embed, limit=most),
        await bus.serve(FEATURES(model=model), FeaturesHandler(source, features, identities, quotas), limit=most),
    )


def why_not_ready(models: Models, workers: Workers) -> str:
    try:
        root = models.resolve(None)
    except PdbusError as error:
        return error.message
    if root not in models.loaded:
        return "the current version's tokenizer is being loaded"
    if models.embeds(root):
        return "" if workers.encoders(root) else "no prefill worker is ready for the current version"
    if workers.kind(root) is None:
        return "no worker is ready for the current version"
    return ""
