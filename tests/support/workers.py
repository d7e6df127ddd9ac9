"""A prefill and a decode worker with a tiny model on one broker, and a router that only asks and listens."""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from pdbus.bus.bus import Bus
from pdbus.bus.presence import Fleet, Presence
from pdbus.context import Deadline, RequestContext
from pdbus.decode.worker import DecodeWorker
from pdbus.engine.scheduler import Limits
from pdbus.engine.versions import Versions
from pdbus.engine.worker import Worker
from pdbus.errors import PdbusError
from pdbus.kv.pool import KvPool
from pdbus.messages.common import Sampling, Ticket
from pdbus.messages.decode import DecodeRun
from pdbus.messages.prefill import PrefillRun
from pdbus.messages.presence import Card
from pdbus.messages.router import TokenFrame, TokenItem
from pdbus.messages.workers import Accepted, Cancel, CancelReason
from pdbus.model.checkpoint import Checkpoint
from pdbus.model.compute import compute_class
from pdbus.peers.cache import CacheRing
from pdbus.prefill.worker import PrefillWorker
from pdbus.subjects import CANCEL, DECODE_RUN, PREFILL_RUN, TOKENS
from pdbus.weights.manifest import Manifest
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

    async def tensors(self, root: bytes, ctx: RequestContext, names: Any = None, *, progress: Any = None) -> Any:
        return {name: array for name, array in self._checkpoints[root].tensors() if names is None or name in names}


@dataclass
class Router:
    """Asks for attempts, and keeps every item that comes by session and attempt."""

    bus: Bus
    id: str
    model: str
    root: bytes
    prefill: str
    decode: str
    items: list[TokenItem] = field(default_factory=list)
    frames: list[TokenFrame] = field(default_factory=list)
    news: asyncio.Event = field(default_factory=asyncio.Event)
    numbers: Any = field(default_factory=lambda: itertools.count(1))

    def hear(self, frame: TokenFrame) -> None:
        self.frames.append(frame)
        self.items.extend(frame.items)
        self.news.set()

    def ticket(self, prompt: list[int], max_tokens: int = 8, **fields: Any) -> Ticket:
        known: dict[str, Any] = {
            "request_id": f"{self.id}-r{next(self.numbers)}",
            "choice": 0,
            "attempt": 1,
            "router": self.id,
            "model": self.model,
            "root": self.root,
            "tenant": "anonymous",
            "salt": b"",
            "prompt": tuple(prompt),
            "delivered": (),
            "sampling": Sampling(temperature=0.0),
            "seed": 7,
            "max_tokens": max_tokens,
            "stop_ids": (),
            "deadline_ns": time.time_ns() + 30_000_000_000,
        }
        return Ticket(**(known | fields))

    async def run_prefill(self, ticket: Ticket) -> Accepted:
        run = PrefillRun(ticket, self.decode)
        return await self.bus.call(PREFILL_RUN(worker=self.prefill), run, RequestContext.after(10))

    async def run_decode(self, ticket: Ticket) -> Accepted:
        run = DecodeRun(ticket, self.prefill)
        return await self.bus.call(DECODE_RUN(worker=self.decode), run, RequestContext.after(10))

    async def start(self, ticket: Ticket) -> None:
        await asyncio.gather(self.run_prefill(ticket), self.run_decode(ticket))

    async def cancel(self, ticket: Ticket, reason: CancelReason = "client_gone") -> None:
        holders = (self.prefill, self.decode)
        await self.bus.publish(
            CANCEL(), Cancel(ticket.request_id, ticket.attempt, self.id, holders, ticket.choice, reason)
        )

    def of(self, ticket: Ticket) -> list[TokenItem]:
        """Items of that attempt by index, each index once."""
        own = [
            item
            for item in self.items
            if (item.request_id, item.choice, item.attempt) == (ticket.request_id, ticket.choice, ticket.attempt)
            and item.finish != "cancelled"
        ]
        return sorted({(item.index, len(item.ids)): item for item in own}.values(), key=lambda item: item.index)

    async def until(self, predicate: Callable[[], bool], within_s: float = 20.0) -> None:
        async with asyncio.timeout(within_s):
            while not predicate():
                self.news.clear()
                await self.news.wait()

    async def answer(self, ticket: Ticket) -> list[TokenItem]:
        """Runs the attempt and waits for all items until its end. Raises the error that it ended with."""
        await self.start(ticket)
        return await self.rest(ticket)

    async def rest(self, ticket: Ticket, first: int | None = None) -> list[TokenItem]:
        """Waits for all items from output index `first` on (those not delivered, unless told)."""
        first = len(ticket.delivered) if first is None else first
        await self.until(lambda: any(item.finish for item in self.of(ticket)))
        end = next(item for item in self.of(ticket) if item.finish)
        if end.error:
            raise end.error.to_exception()
        await self.until(lambda: len(ids(self.of(ticket))) >= end.index + len(end.ids) - first)
        return self.of(ticket)

    async def cancelled_by(self, ticket: Ticket, workers: set[str]) -> None:
        """Waits until each of the workers has answered the cancel."""

        def answered() -> bool:
            told = {
                frame.worker
                for frame in self.frames
                for item in frame.items
                if item.finish == "cancelled" and item.request_id == ticket.request_id
            }
            return workers <= told

        await self.until(answered)


def ids(items: list[TokenItem]) -> list[int]:
    return [token for item in items for token in item.ids]


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

    async def until_idle(self, within_s: float = 10.0) -> None:
        """Both workers hold nothing for any request."""
        async with asyncio.timeout(within_s):
            while any(busy(worker) for worker in (self.prefill, self.decode)):
                await asyncio.sleep(0.01)
        for worker in (self.prefill, self.decode):
            await worker.core.call(lambda worker=worker: worker.core.pages.check([]))
            assert all(worker.versions.get(root).pins == 0 for root in worker.versions.roots)


def busy(worker: Worker[Any]) -> bool:
    load = worker.load()
    return bool(load.running or load.waiting or load.pages_used or load.leases or load.streams or worker.jobs)


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
) -> AsyncIterator[Rig]:
    torch.set_num_threads(1)
    async with AsyncExitStack() as stack:
        enter = stack.enter_async_context
        router_bus = await enter(new_bus())
        router = Router(router_bus, f"{name}-router", name, source.root_of[version], f"{name}-p", f"{name}-d")
        await router_bus.subscribe(TOKENS(router=router.id), router.hear)
        await enter(Presence(router_bus, lambda seq: _card("router", router.id, router_bus, name, seq)))

        killable = await enter(AsyncExitStack())
        workers: list[Any] = []
        for kind, id_, count in (("prefill", router.prefill, pages), ("decode", router.decode, decode_pages or pages)):
            inner = killable if kind == "prefill" else stack
            bus = await inner.enter_async_context(new_bus())
            fleet = await inner.enter_async_context(Fleet(bus))
            versions = await inner.enter_async_context(Versions(source, "cpu", compute_class("cpu")))
            versions.want(source.root_of.values())
            first = await versions.first()
            await _all_loaded(versions, source)
            pool = KvPool(first.model.page_format(), count)
            limits = Limits(pool.format.page_tokens, chunk_tokens, running)
            common = (bus, id_, name, versions, fleet, pool, limits)
            if kind == "prefill":
                ring = await inner.enter_async_context(CacheRing(bus, fleet, replicas=1))
                worker: Any = PrefillWorker(*common, ring)
            else:
                worker = DecodeWorker(*common)
            workers.append(await inner.enter_async_context(worker))
            card = _card(kind, id_, bus, name, 0)
            await inner.enter_async_context(Presence(bus, lambda seq, card=card: replace(card, seq=seq)))
        everyone = {router.id, router.prefill, router.decode}
        for worker in workers:
            await worker.fleet.wait_for(
                lambda fleet: all(fleet.state(id_) == "live" for id_ in everyone), Deadline.after(10)
            )
        yield Rig(router, workers[0], workers[1], source, new_bus, stack, killable.aclose)


async def _all_loaded(versions: Versions, source: LocalSource) -> None:
    for root in source.root_of.values():
        with await versions.pin(root, Deadline.after(20)):
            pass


def _card(service: str, id_: str, bus: Bus, model: str, seq: int) -> Card:
    return Card(service, id_, bus.incarnation, seq, "ready", model)


def silence(bus: Bus) -> None:
    """From now on nothing leaves that process: to the others it is dead."""
    for transport in (bus.transport, bus.bulk._transport):
        transport.send = lambda *parts, **options: None  # type: ignore[method-assign]


async def refused(work: Any) -> PdbusError:
    """The error that `work` raises."""
    try:
        await work
    except PdbusError as error:
        return error
    raise AssertionError("it was not refused")
