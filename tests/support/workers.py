"""A prefill and a decode worker with a tiny model on one broker, and a router that only asks and listens."""

from __future__ import annotations

import asyncio
import itertools
import random
import threading
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch

from pdbus.bus.bus import Bus
from pdbus.bus.presence import Fleet, Presence
from pdbus.context import Deadline, RequestContext
from pdbus.decode.job import DecodeJob
from pdbus.decode.worker import DecodeWorker
from pdbus.engine.chunks import Chunk
from pdbus.engine.scheduler import Limits
from pdbus.engine.sequence import Event
from pdbus.engine.versions import Versions
from pdbus.engine.worker import Worker
from pdbus.kv.format import KvDtype
from pdbus.kv.pages import PageTable
from pdbus.kv.swap_file import SwapFile
from pdbus.messages.presence import Card
from pdbus.model.backends import BackendOptions, EngineName, Precision, open_backend
from pdbus.model.checkpoint import Checkpoint
from pdbus.peers.cache import CacheRing
from pdbus.prefill.worker import PrefillWorker
from pdbus.subjects import TOKENS
from pdbus.weights.manifest import Manifest
from tests.support.asking import Router, until
from tests.support.weights import manifest_and_blocks

NewBus = Callable[[], Any]
"""Makes an async context manager of a Bus on the test's broker."""


class LocalSource:
    """Versions of checkpoints at hand, instead of param-servers."""

    def __init__(self, checkpoints: Mapping[str, Checkpoint]) -> None:
        self.manifests: dict[bytes, Manifest] = {}
        self._checkpoints: dict[bytes, Checkpoint] = {}
        self.root_of: dict[str, bytes] = {}
        for name, checkpoint in checkpoints.items():
            manifest, _ = manifest_and_blocks(dict(checkpoint.tensors()), checkpoint.meta)
            self.manifests[manifest.root] = manifest
            self._checkpoints[manifest.root] = checkpoint
            self.root_of[name] = manifest.root

    async def manifest(self, root: bytes, ctx: RequestContext) -> Manifest:
        return self.manifests[root]

    async def meta(self, root: bytes, ctx: RequestContext) -> Mapping[str, bytes]:
        return self._checkpoints[root].meta

    async def tensors(
        self, root: bytes, ctx: RequestContext, names: Any = None, *, rows: slice | None = None, progress: Any = None
    ) -> Any:
        all_rows = rows or slice(None)
        known = self._checkpoints[root].tensors()
        return {name: array[all_rows] for name, array in known if names is None or name in names}

    async def runs(self, root: bytes, ctx: RequestContext, runs: Any, *, progress: Any = None) -> Any:
        known = dict(self._checkpoints[root].tensors())
        return [known[run.tensor][run.rows] for run in runs]


def prompt_of(length: int, seed: int = 0) -> list[int]:
    return random.Random(seed).choices(range(3, 320), k=length)


@contextmanager
def paused(worker: Worker[Any]) -> Iterator[None]:
    """The worker's engine takes no turn meanwhile."""
    gate = threading.Event()
    worker.core.post(gate.wait)
    try:
        yield
    finally:
        gate.set()


@contextmanager
def held_after(worker: Worker[Any], passes: int) -> Iterator[threading.Event]:
    """The worker's engine computes so many passes, and stays within the next until the scope is left: however slow
    everything else is, it runs no further. Yields what is set once it is there."""
    core, there, gate, done = worker.core, threading.Event(), threading.Event(), itertools.count()
    compute = core._compute

    def hold(group: Sequence[Chunk]) -> list[Event]:
        if next(done) >= passes:
            there.set()
            gate.wait()
        return compute(group)

    core._compute = hold  # type: ignore[method-assign, assignment]
    try:
        yield there
    finally:
        gate.set()
        core._compute = compute  # type: ignore[method-assign]


def receiving(rig: Rig) -> bool:
    """Some of a prompt's KV has arrived at the decode worker."""
    return any(isinstance(job, DecodeJob) and job.lease and job.lease.frames for job in rig.decode.jobs)


@dataclass
class Rig:
    """The workers, the router, and what stands behind them."""

    router: Router
    prefill: PrefillWorker
    decode: DecodeWorker
    source: LocalSource
    new_bus: NewBus
    stack: AsyncExitStack
    kill_prefill: Callable[[], Any]
    others: list[DecodeWorker]
    """Further decode workers."""

    async def until_idle(self, within_s: float = 30.0) -> None:
        """The workers hold nothing for any request."""
        everyone: list[Worker[Any]] = [self.prefill, self.decode, *self.others]
        await until(lambda: not any(busy(worker) for worker in everyone), within_s)
        for worker in everyone:
            async with asyncio.timeout(within_s):
                while not await worker.core.call(partial(_nobody_holds, worker.core.pages)):  # noqa: ASYNC110
                    await asyncio.sleep(0)  # a page is being written back just now
            assert all(worker.versions.get(root).pins == 0 for root in worker.versions.roots)


def _nobody_holds(pages: PageTable) -> bool:
    """Whether that is so now; then the table's own books have to agree."""
    if pages.used:
        return False
    pages.check([])
    return True


def busy(worker: Worker[Any]) -> bool:
    load = worker.load()
    return bool(load.running or load.waiting or load.pages_used or load.leases or load.streams or len(worker.jobs))


@asynccontextmanager
async def rig(
    new_bus: NewBus,
    source: LocalSource,
    *,
    name: str,
    version: str = "a",
    pages: int = 64,
    decode_pages: int | None = None,
    chunk_tokens: int = 32,
    running: int = 8,
    kv_dtype: KvDtype = "fp32",
    engine: EngineName = "torch",
    precision: Precision = "fp32",
    swap_pages: int = 0,
    layer_groups: int = 1,
    decodes: int = 1,
) -> AsyncIterator[Rig]:
    torch.set_num_threads(1)
    async with AsyncExitStack() as stack:
        enter = stack.enter_async_context
        router_bus = await enter(new_bus())
        router = Router(router_bus, f"{name}-router", name, source.root_of[version], f"{name}-p", f"{name}-d")
        await router_bus.subscribe(TOKENS(router=router.id), router.hear)
        present = [await enter(Presence(router_bus, lambda seq: _card("router", router.id, router_bus, name, seq)))]

        killable = await enter(AsyncExitStack())
        workers: list[Any] = []
        made = [("prefill", router.prefill, pages), ("decode", router.decode, decode_pages or pages)]
        made += [("decode", f"{router.decode}{number}", decode_pages or pages) for number in range(2, decodes + 1)]
        for kind, id_, count in made:
            inner = killable if kind == "prefill" else stack
            bus = await inner.enter_async_context(new_bus())
            fleet = await inner.enter_async_context(Fleet(bus))
            options = BackendOptions(engine, precision, kv_dtype, layer_groups=layer_groups)
            versions = await inner.enter_async_context(Versions(source, partial(open_backend, options)))
            versions.want(source.root_of.values())
            first = await versions.first()
            await _all_loaded(versions, source)
            assert versions.backend
            pool = versions.backend.pool(first.scope.page_format, count, first.streams)
            limits = Limits(pool.format.page_tokens, chunk_tokens, running)
            common = (bus, id_, name, versions, fleet, pool, limits)
            # With patience: a quarter of a second may be over before a busy machine has done anything.
            ring = await inner.enter_async_context(CacheRing(bus, fleet, replicas=1, get_s=30.0))
            if kind == "prefill":
                worker: Any = PrefillWorker(*common, ring)
            else:
                swap = inner.enter_context(SwapFile(None, swap_pages * pool.format.page_bytes, pool.format.page_bytes))
                worker = DecodeWorker(*common, ring, swap)
            workers.append(await inner.enter_async_context(worker))
            card = replace(
                _card(kind, id_, bus, name, 0),
                roots=versions.roots,
                page_format=str(pool.format),
                compute_class=versions.compute_class,
            )
            presence = Presence(bus, lambda seq, card=card, worker=worker: replace(card, seq=seq, load=worker.load()))
            present.append(await inner.enter_async_context(presence))
        for presence in present:
            await presence.announce()
        everyone = {router.id, *(id_ for _, id_, _ in made)}
        for worker in workers:
            await worker.fleet.wait_for(
                lambda fleet: all(fleet.state(id_) == "live" for id_ in everyone), Deadline.after(30)
            )
        yield Rig(router, workers[0], workers[1], source, new_bus, stack, killable.aclose, workers[2:])


async def _all_loaded(versions: Versions, source: LocalSource) -> None:
    for root in source.root_of.values():
        with await versions.pin(root, Deadline.after(30)):
            pass


def _card(service: str, id_: str, bus: Bus, model: str, seq: int) -> Card:
    return Card(service, id_, bus.incarnation, seq, "ready", model)


def silence(bus: Bus) -> None:
    """From now on nothing leaves that process: to the others it is dead."""
    for transport in (bus.transport, bus.bulk._transport):
        transport.send = lambda *parts, **options: None  # type: ignore[method-assign]
