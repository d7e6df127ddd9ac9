"""What services use: calls, streams, handlers and events over typed subjects."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import AsyncIterator, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any, TypeVar

from opentelemetry import trace
from opentelemetry.trace import SpanKind

from pdbus.bus import headers
from pdbus.bus.bulk import BulkPort
from pdbus.bus.calls import Calls
from pdbus.bus.codec import decode, encode
from pdbus.bus.events import EventHandler, EventRegistration
from pdbus.bus.inbox import Inbox
from pdbus.bus.instruments import Instruments, mark_failed
from pdbus.bus.logs import Logs
from pdbus.bus.memory import MemoryBroker, MemoryTransport
from pdbus.bus.micro import Micro
from pdbus.bus.nats import NatsTransport
from pdbus.bus.serving import Handler, Registration, StreamHandler
from pdbus.bus.streams import Replies
from pdbus.bus.transport import Transport
from pdbus.context import RequestContext, new_id
from pdbus.errors import Corrupt, Forbidden, InvalidRequest, Unavailable
from pdbus.nats_access import NatsAccess
from pdbus.recording import Recorder
from pdbus.subjects import To, ToEvent

log = logging.getLogger(__name__)
Q = TypeVar("Q")
R = TypeVar("R")


class Bus:
    """One process on the bus. Made by `connect()` or `memory_bus()`."""

    def __init__(self, control: Transport, bulk: Transport) -> None:
        """`control` for messages, `bulk` for bulk streams; `logs` exist where `control` is a real server's."""
        self.incarnation = new_id()
        """Random for this life of the process: sequences and leases of a former life are worthless."""
        self.instruments = Instruments()
        self.recorder: Recorder | None = None
        """Of this process, where its history is wanted (settings.py)."""
        self.transport = control
        self.bulk = BulkPort(bulk, self.instruments)
        self._logs = Logs(control, self.instruments) if isinstance(control, NatsTransport) else None
        self._micro: Micro | None = None
        self._inbox = Inbox(control, self.incarnation)
        self._calls = Calls(control, self._inbox)
        self._streams: set[Replies[Any]] = set()
        self._registrations: list[Registration[Any, Any] | EventRegistration[Any]] = []
        control.on_lost(self._on_lost)
        control.on_refused(self._on_refused)

    @property
    def malformed(self) -> int:
        """Messages that could not be read, since the start."""
        return self.instruments.malformed_count

    @property
    def durable(self) -> bool:
        """Whether there are logs."""
        return self._logs is not None

    @property
    def logs(self) -> Logs:
        """Raises Unavailable on the in-memory twin, which has none."""
        if self._logs is None:
            raise Unavailable("logs and work queues need a real NATS server")
        return self._logs

    def held(self) -> dict[str, int]:
        """Counts of what is under way on it, by name."""
        registrations = [it for it in self._registrations if isinstance(it, Registration)]
        return {
            "calls": len(self._calls),
            "streams": len(self._streams),
            "serving": sum(registration.running for registration in registrations),
            "bulk_streams": self.bulk.open_streams,
        }

    async def __aenter__(self) -> Bus:
        await self._inbox.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        for registration in reversed(self._registrations):
            await registration.close()
        if self._logs:
            await self._logs.close()
        if self._micro:
            await self._micro.close()
        await self.bulk.stop()
        await self._inbox.stop()

    async def call(self, to: To[Q, R], message: Q, ctx: RequestContext) -> R:
        """Sends `message` and returns the checked reply.

        Raises the peer's error as its class; Unavailable when nobody serves the subject or the connection broke before
        the reply (it may have been handled); DeadlineExceeded; TooLarge; Corrupt for a reply that can't be read."""
        started = time.monotonic()
        try:
            with self.instruments.span(SpanKind.CLIENT, "request", to.subject, ctx.request_id):
                raw = await self._calls.ask(to.name, encode(message), ctx)
                error = headers.error_of(raw, to.name)
                if error:
                    raise error
                try:
                    return decode(to.subject.reply, raw.data)
                except InvalidRequest as broken:
                    raise Corrupt(f"{to.name} sent a reply that can't be read: {broken.message}") from None
        finally:
            self.instruments.calls.record(
                time.monotonic() - started, {"messaging.destination.template": to.subject.template}
            )

    @asynccontextmanager
    async def stream(self, to: To[Q, R], message: Q, ctx: RequestContext) -> AsyncIterator[Replies[R]]:
        """The replies to `message` as an asynchronous iterator. Leaving the scope early makes the peer stop.

        Raises as `call` does; also Corrupt when a frame is missing, and Overloaded when the reader falls far behind."""
        ctx.deadline.check(f"{to.name} was asked")
        span = self.instruments.start_span(SpanKind.CLIENT, "request", to.subject, ctx.request_id, None)
        reply = ""

        def ask(sender: str) -> None:
            with contextlib.suppress(Unavailable):  # a lost connection is told otherwise
                self.transport.send(sender, reply=reply, headers=headers.ALIVE_WANTED)

        replies = Replies(to.name, to.subject.reply, ctx.deadline, ask)
        self._streams.add(replies)
        try:
            with self._inbox.open(replies.on_frame) as reply:
                sent = headers.request_headers(ctx, trace.set_span_in_context(span))
                await self._calls.connected(to.name, ctx)
                self.transport.send(to.name, encode(message), reply=reply, headers=sent)
                yield replies
        except BaseException as error:
            if not isinstance(error, GeneratorExit | asyncio.CancelledError):
                mark_failed(span, error)
            raise
        finally:
            self._streams.discard(replies)
            span.end()
            if not replies.finished and replies.stop_subject:
                self._inbox.refuse(replies.stop_subject)

    async def serve(
        self, to: To[Q, R], handler: Handler[Q, R] | StreamHandler[Q, R], *, limit: int = 64
    ) -> Registration[Q, R]:
        """Answers requests to `to`: `handler(message, ctx)` returns the reply, or is an async generator (StreamRpc).

        At most `limit` requests are at work at once; more are answered `overloaded`. The handler is cancelled when the
        deadline passes, and closed when the caller of its stream is gone. What it raises goes to the caller."""
        registration = Registration(to, handler, limit, self.transport, self._inbox, self.instruments)
        await self._keep(registration)
        return registration

    async def publish(self, to: ToEvent[Q], message: Q) -> None:
        """Sends an event. While there is no connection it is dropped and counted: an event may always be lost.

        Raises TooLarge."""
        try:
            self.transport.send(to.name, encode(message))
            await self.transport.writable()
        except Unavailable as error:
            self.instruments.dropped(to.name, error.message)

    async def subscribe(self, to: ToEvent[Q], handler: EventHandler[Q]) -> EventRegistration[Q]:
        """Calls `handler(message)`, plain or asynchronous, for every event of `to` (tokens may be ANY), in order."""
        registration = EventRegistration(to, handler, self.transport, self.instruments)
        await self._keep(registration)
        return registration

    async def register_micro(self, service: str, id_: str, metadata: Mapping[str, str]) -> None:
        """Makes the process visible to the NATS services API (`nats micro list`) until the bus ends."""

        def served() -> list[Registration[Any, Any]]:
            return [it for it in self._registrations if isinstance(it, Registration) and not it.closed]

        self._micro = Micro(service, id_, metadata, served)
        await self._micro.start(self.transport)

    async def _keep(self, registration: Registration[Any, Any] | EventRegistration[Any]) -> None:
        """Starts it, and closes it at the end unless its user did."""
        self._registrations = [other for other in self._registrations if not other.closed]
        self._registrations.append(registration)
        await registration.start()

    def _on_lost(self) -> None:
        """Replies to what was asked before may never come: who waits learns it now, not at its deadline."""
        self._calls.lost()
        for stream in self._streams:
            stream.fail(Unavailable("the connection to NATS broke in mid-stream"))

    def _on_refused(self, subject: str) -> None:
        """NATS dropped what was sent there: nobody will answer it. `subject` is in lower case."""
        self._calls.refused(subject)
        for stream in self._streams:
            if stream.name.lower() == subject:
                stream.fail(Forbidden(f"NATS does not let this process publish to {stream.name}"))


@asynccontextmanager
async def memory_bus(broker: MemoryBroker) -> AsyncIterator[Bus]:
    """A bus on the in-memory twin."""
    async with Bus(MemoryTransport(broker), MemoryTransport(broker)) as bus:
        yield bus


@asynccontextmanager
async def connect(
    nats_url: str, *, name: str, wait_s: float = 10.0, access: NatsAccess | None = None
) -> AsyncIterator[Bus]:
    """A bus on a real server: one connection for messages, one for bulk. `nats_url`: one or more, separated by commas.

    `name` is what the server shows of this client; `access`: its key, and TLS (nats_access.py); None: an open server.
    Raises Unavailable when no server is there within `wait_s`, Unauthorized when it refuses the key, and
    InvalidRequest for a key that can't be used."""
    access = access or NatsAccess()
    async with AsyncExitStack() as stack:
        transports = [NatsTransport(nats_url, name, access), NatsTransport(nats_url, f"{name}-bulk", access)]
        for transport in transports:
            stack.push_async_callback(transport.close)
            await transport.start(wait_s)
        yield await stack.enter_async_context(Bus(*transports))
