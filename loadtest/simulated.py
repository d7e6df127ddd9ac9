"""Workers that answer tickets without a model: deterministic tokens, at a set pace, with faults on demand.

They speak the workers' side of the bus in full (tickets, token frames, resends, cancels, presence, the index of their
pages), so that a router can be measured and tested without torch. What passes between prefill and decode stays within
this process.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from contextlib import AbstractAsyncContextManager, AsyncExitStack
from typing import Self
from unittest import mock

from loadtest.simulated_behaviour import Behaviour
from loadtest.simulated_pages import SimulatedPages
from loadtest.simulated_peers import Key, Peers, meant
from loadtest.simulated_running import Running
from loadtest.simulated_version import COMPUTE_CLASS, PAGE_FORMAT
from pdbus.bus.bus import Bus
from pdbus.bus.presence import Presence
from pdbus.context import RequestContext, new_id
from pdbus.engine.outbox import Outbox
from pdbus.engine.tickets import is_name
from pdbus.errors import Overloaded, Unavailable
from pdbus.kv.prefix import PrefixScope
from pdbus.messages.common import Digest, Ticket
from pdbus.messages.decode import DecodeRun
from pdbus.messages.prefill import PrefillRun
from pdbus.messages.presence import Card, Load, State
from pdbus.messages.router import TokenItem
from pdbus.messages.workers import Accepted, Cancel, Resend, ResendReply
from pdbus.subjects import CANCEL, DECODE_RESEND, DECODE_RUN, PREFILL_RESEND, PREFILL_RUN, TOKENS
from pdbus.tasks import cancelled

PAGES = 4096


class SimulatedWorker:
    """One worker. `held` counts what a real one would hold pages for."""

    def __init__(
        self,
        service: str,
        id: str,
        bus: Bus,
        roots: tuple[Digest, ...],
        model: str,
        peers: Peers,
        scopes: Mapping[Digest, PrefixScope] | None = None,
    ) -> None:
        """`scopes`: of the roots whose pages it keeps and tells of."""
        self.service = service
        self.id = id
        self.roots = roots
        self.behaviour = Behaviour()
        self.tickets: list[Ticket] = []
        """Every ticket accepted, in order."""
        self.refused = 0
        """Tickets, by its behaviour."""
        self.resends = 0
        self.page_format = PAGE_FORMAT
        self.compute_class = COMPUTE_CLASS
        self.local_tokens = 0
        self._model = model
        self._bus = bus
        self._peers = peers
        self.incarnation = new_id()
        self.pages = SimulatedPages(id, self.incarnation, bus, scopes or {}, PAGES)
        self._outbox = Outbox(id, self.incarnation)
        self._running: dict[Key, Running] = {}
        self._cancelled: dict[tuple[str, int | None], int] = {}
        self._work = asyncio.Event()
        self._stack = AsyncExitStack()
        self._presence = Presence(bus, self._card)
        self._silent = False
        self.state: State = "ready"

    @property
    def held(self) -> int:
        return len(self._running) + self._peers.waiting_for(self.id)

    @property
    def kept(self) -> int:
        """Attempts whose frames are kept for a resend."""
        return len(self._outbox)

    async def __aenter__(self) -> Self:
        bus, worker = self._bus, self.id
        serving: list[AbstractAsyncContextManager[object]]
        if self.service == "prefill":
            serving = [
                await bus.serve(PREFILL_RUN(worker=worker), self._on_prefill, limit=4096),
                await bus.serve(PREFILL_RESEND(worker=worker), self._on_resend, limit=4096),
            ]
        else:
            serving = [
                await bus.serve(DECODE_RUN(worker=worker), self._on_decode, limit=4096),
                await bus.serve(DECODE_RESEND(worker=worker), self._on_resend, limit=4096),
            ]
        for registration in serving:
            await self._stack.enter_async_context(registration)
        await self._stack.enter_async_context(await bus.subscribe(CANCEL(), self._on_cancel))
        await self._stack.enter_async_context(self.pages)
        steps = asyncio.create_task(self._steps())
        self._stack.push_async_callback(cancelled, steps)
        await self._stack.enter_async_context(self._presence)
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._stack.aclose()

    async def die(self) -> None:
        """At once, and without a word, also to what it was asked before: nobody serves its subjects, no card comes."""
        with mock.patch.object(self._bus.transport, "send"):
            await self._stack.aclose()
        self._running.clear()
        self._peers.died(self)

    async def fall_silent(self) -> None:
        """It works on, and nothing that it says is heard any more; what is asked of it is refused."""
        self.behaviour.tamper, self.behaviour.refuse = lambda frame: (), Overloaded("cut off")
        self._silent = True
        await self._presence.__aexit__(None, None, None)

    async def hang(self) -> None:
        """Stops as under SIGSTOP: its subjects are there, and nothing is answered or published any more."""
        self.behaviour.tamper, self.behaviour.hung = lambda frame: (), True
        await self._presence.__aexit__(None, None, None)

    async def engine_hangs(self) -> None:
        """It answers, accepts and says that it is hung, and computes nothing any more."""
        self.behaviour.tamper = lambda frame: ()
        self.state = "hung"
        await self._presence.announce()

    def begin(self, ticket: Ticket) -> None:
        """The ticket's KV is here."""
        self._begin(ticket, reads=False)

    def _begin(self, ticket: Ticket, *, reads: bool) -> None:
        if not self.behaviour.mute:
            answer, cached = self.behaviour.script(ticket), self.pages.read(ticket)
            start = len(ticket.delivered) + (0 if reads else 1)
            self._running[ticket.session, ticket.attempt] = Running(ticket, answer, start, cached if reads else None)
            self._work.set()

    def _card(self, seq: int) -> Card:
        return Card(
            self.service,
            self.id,
            self.incarnation,
            seq,
            self.state,
            self._model,
            roots=self.roots,
            load=Load(
                running=len(self._running), slots=self.behaviour.slots, pages_total=PAGES, pages_used=len(self._running)
            ),
            compute_class=self.compute_class,
            page_format=self.page_format,
            local_tokens=self.local_tokens,
        )

    async def _on_prefill(self, run: PrefillRun, ctx: RequestContext) -> Accepted:
        await self.behaviour.hears(ctx)
        return self._accept(run.ticket, lambda: self._begin(run.ticket, reads=True))

    async def _on_decode(self, run: DecodeRun, ctx: RequestContext) -> Accepted:
        ticket = run.ticket
        await self.behaviour.hears(ctx)
        if run.prefill_worker is None:
            return self._accept(ticket, lambda: self._begin(ticket, reads=True))
        key = ticket.session, ticket.attempt
        return self._accept(ticket, lambda: self._peers.await_handoff(self, key, ticket))

    def _accept(self, ticket: Ticket, begin: Callable[[], None]) -> Accepted:
        if self.behaviour.refuse is not None:
            self.refused += 1
            raise self.behaviour.refuse
        self.tickets.append(ticket)
        if ticket.attempt > self._cancelled.get((ticket.request_id, ticket.choice), 0):
            begin()
        return Accepted(self.id, self.incarnation, len(self._running))

    async def _on_resend(self, message: Resend, ctx: RequestContext) -> ResendReply:
        await self.behaviour.hears(ctx, ticket=False)
        if self._silent:
            raise Unavailable("cut off")
        self.resends += 1
        key = message.session, message.attempt
        reply = self._outbox.resend(message)
        held = key in self._running or self._peers.waits(self, key)
        return ResendReply("running") if reply.state == "unknown" and (held or self.behaviour.mute) else reply

    async def _on_cancel(self, message: Cancel) -> None:
        if self.id not in message.holders:
            return
        if self.behaviour.deaf_cancels and message.reason != "finished":
            self.behaviour.deaf_cancels -= 1
            return
        scope = (message.request_id, message.choice)
        self._cancelled[scope] = max(message.attempt, self._cancelled.get(scope, 0))
        for key in [key for key in self._running if key[1] <= message.attempt and meant(key, message)]:
            del self._running[key]
        self._peers.drop(self, message)
        self._outbox.acknowledge(message)
        if message.reason != "finished" and is_name(message.router):
            answer = TokenItem(
                message.request_id, message.choice or 0, message.attempt, b"", -1, (), finish="cancelled"
            )
            await self._send([(message.router, answer)])

    async def _steps(self) -> None:
        """One token of everything that runs, then a frame for each router: as a batch's step."""
        while True:
            await self._work.wait()
            if not self._running:
                self._work.clear()
                continue
            in_step = list(self._running.items())[: self.behaviour.slots or None]
            items = [(running.ticket.router, self._next(key, running)) for key, running in in_step]
            await self._send(items)
            await asyncio.sleep(self.behaviour.step_s)

    def _next(self, key: Key, running: Running) -> TokenItem:
        ticket, index = running.ticket, running.next_index
        fault = self.behaviour.fault(ticket, index, decodes=self.service == "decode")
        if fault is not None:
            del self._running[key]
            return fault
        item = running.item()
        if self.service == "prefill":
            del self._running[key]
            if item.finish is None:
                self._peers.hand_over(key)
        elif item.finish:
            del self._running[key]
            self.pages.filled(ticket, running.answer[: index + len(item.ids)])
        running.next_index += 1
        return item

    async def _send(self, items: list[tuple[str, TokenItem]]) -> None:
        now_s = asyncio.get_running_loop().time()
        for router, item in items:
            self._outbox.put(router, item, now_s)
        for router, frame in self._outbox.take():
            for sent in self.behaviour.tamper(frame):
                await self._bus.publish(TOKENS(router=router), sent)
