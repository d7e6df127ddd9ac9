"""A router on the in-memory bus with simulated workers, for tests of all that it promises."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field

from loadtest.simulated import SimulatedWorker
from loadtest.simulated_peers import Peers
from loadtest.simulated_version import SimulatedVersions, scope, version
from pdbus.bus.bus import Bus, connect, memory_bus
from pdbus.bus.memory import MemoryBroker
from pdbus.bus.presence import Fleet
from pdbus.context import Deadline, RequestContext
from pdbus.messages.common import Digest
from pdbus.router.settings import RouterSettings
from pdbus.router.wiring import Router, router
from tests.support.feature_entries import DictEntries

MODEL = "toy"


@dataclass
class DictRing:
    """A cache ring that never forgets."""

    entries: dict[bytes, tuple[bytes, bytes, bytes]] = field(default_factory=dict)
    gets: int = 0
    max_ages: list[float | None] = field(default_factory=list)

    async def get(
        self,
        kind: str,
        keys: Sequence[Digest],
        root: Digest,
        materials: Sequence[bytes],
        ctx: RequestContext,
        *,
        max_age_s: float | None = None,
    ) -> list[bytes | None]:
        self.gets += 1
        self.max_ages.append(max_age_s)
        found = [self.entries.get(key) for key in keys]
        return [
            entry[2] if entry and entry[:2] == (root, material) else None
            for entry, material in zip(found, materials, strict=True)
        ]

    def put(
        self, kind: str, key: Digest, root: Digest, material: bytes, value: bytes, ctx: RequestContext, *, ttl_s: float
    ) -> bool:
        self.entries[key] = (root, material, value)
        return True


@dataclass
class Rig:
    bus: Bus
    broker: MemoryBroker
    fleet: Fleet
    versions: SimulatedVersions
    ring: DictRing
    prefills: list[SimulatedWorker]
    decodes: list[SimulatedWorker]
    router: Router
    roots: tuple[Digest, ...]
    start: Callable[[str, str], Awaitable[SimulatedWorker]]
    """A worker of this service and id."""

    @property
    def url(self) -> str:
        return self.router.http.url

    @property
    def workers(self) -> list[SimulatedWorker]:
        return self.prefills + self.decodes

    @property
    def idle(self) -> bool:
        """Nothing is held anywhere: not by the router, not by a worker."""
        router = self.router
        return (
            router.frontend.admission.running == 0
            and router.hub.listening_for == 0
            and router.workers.idle
            and router.cancels.open == 0
            and not any(worker.held or worker.kept for worker in self.workers)
        )

    async def start_again(self, dead: SimulatedWorker) -> SimulatedWorker:
        """Another life of a worker: returns once the router knows of it."""
        new = await self.start(dead.service, dead.id)
        workers = self.prefills if dead.service == "prefill" else self.decodes
        workers[workers.index(dead)] = new
        await until(lambda: self.router.index.table.incarnation(new.id) == new.incarnation)
        return new

    async def until_idle(self) -> None:
        """Raises TimeoutError where something stays held."""
        await until(lambda: self.idle)


async def until(holds: Callable[[], bool], seconds: float = 30.0) -> None:
    """For what several parties bring about, none of which tells. Raises TimeoutError."""
    async with asyncio.timeout(seconds):
        while not holds():  # noqa: ASYNC110 - as it says
            await asyncio.sleep(0.01)


@asynccontextmanager
async def rig(
    prefills: int = 1,
    decodes: int = 1,
    versions: int = 1,
    local_tokens: int = 0,
    nats_url: str | None = None,
    model: str = MODEL,
    slots: int = 0,
    step_s: float = 0.0,
    **settings: object,
) -> AsyncIterator[Rig]:
    """`nats_url`: of a real server, with streams; None: the in-memory twin. `slots`, `step_s`: of each decode worker
    (loadtest/simulated_behaviour.py)."""

    def connected() -> AbstractAsyncContextManager[Bus]:
        return memory_bus(broker) if nats_url is None else connect(nats_url, name="rig")

    manifests = [version(number) for number in range(versions)]
    roots = tuple(manifest.root for manifest in manifests)
    scopes = {manifest.root: scope(manifest) for manifest in manifests}
    made = SimulatedVersions(*manifests)
    broker, peers, ring = MemoryBroker(), Peers(), DictRing()
    async with AsyncExitStack() as stack:
        bus = await stack.enter_async_context(connected())
        if nats_url is not None:
            await bus.logs.ensure()
        fleet = await stack.enter_async_context(Fleet(bus))

        async def start(service: str, id: str) -> SimulatedWorker:
            own = await stack.enter_async_context(connected())
            worker = SimulatedWorker(service, id, own, roots, model, peers, scopes)
            worker.local_tokens = local_tokens if service == "decode" else 0
            worker.behaviour.slots, worker.behaviour.step_s = min(slots, 1) if service == "prefill" else slots, step_s
            return await stack.enter_async_context(worker)

        workers = {
            service: [await start(service, f"{service}-{number}") for number in range(count)]
            for service, count in (("prefill", prefills), ("decode", decodes))
        }
        total = prefills + decodes
        await fleet.wait_for(lambda f: len(f.live("prefill")) + len(f.live("decode")) == total, Deadline.after(30))
        chosen = RouterSettings(**({"id": "r-0", "model": model, "http_port": 0} | settings))  # type: ignore[arg-type]
        made_router = await stack.enter_async_context(router(chosen, bus, fleet, made, made, ring, DictEntries()))
        for root in roots:
            await made_router.frontend.models.get(root, Deadline.after(30))
        await until(lambda: all(made_router.index.table.incarnation(card.id) for card in fleet.cards()))
        yield Rig(bus, broker, fleet, made, ring, workers["prefill"], workers["decode"], made_router, roots, start)
