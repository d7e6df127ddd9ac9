"""The serving side: each request in a bounded task of its own, answered whatever happens, never past its deadline."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable
from contextlib import aclosing
from typing import Generic, TypeAlias, TypeVar, cast

from opentelemetry.trace import SpanKind

from pdbus.bus import headers
from pdbus.bus.codec import decode, encode
from pdbus.bus.inbox import Inbox
from pdbus.bus.instruments import Instruments
from pdbus.bus.transport import NO_HEADERS, Raw, Subscription, Transport
from pdbus.context import Deadline, RequestContext
from pdbus.errors import DeadlineExceeded, InvalidRequest, Overloaded, PdbusError, Unavailable
from pdbus.nats_access import OPEN_INBOX
from pdbus.subjects import StreamRpc, To
from pdbus.tasks import cancelled

log = logging.getLogger(__name__)
Q = TypeVar("Q")
R = TypeVar("R")

Handler: TypeAlias = Callable[[Q, RequestContext], Awaitable[R]]
StreamHandler: TypeAlias = Callable[[Q, RequestContext], AsyncIterator[R]]

KEEPALIVE_S = 1.0
"""A stream's sender says at least so often that it is at work."""


class Registration(Generic[Q, R]):
    """One served subject. Leaving it as a context manager is `close()`."""

    def __init__(
        self,
        to: To[Q, R],
        handler: Handler[Q, R] | StreamHandler[Q, R],
        limit: int,
        transport: Transport,
        inbox: Inbox,
        instruments: Instruments,
    ) -> None:
        self.to = to
        self.requests = 0
        self.errors = 0
        self.busy_s = 0.0
        self._handler = handler
        self._limit = limit
        self._transport = transport
        self._inbox = inbox
        self._instruments = instruments
        self._subscription: Subscription | None = None
        self._tasks: set[asyncio.Task[None]] = set()

    async def start(self) -> None:
        queue = self.to.subject.queue or ""
        self._subscription = await self._transport.subscribe(self.to.name, self._on_request, queue)

    @property
    def closed(self) -> bool:
        return self._subscription is None and not self._tasks

    @property
    def running(self) -> int:
        return len(self._tasks)

    async def stop(self) -> None:
        """No more intake; what runs goes on."""
        subscription, self._subscription = self._subscription, None
        if subscription:
            await subscription.close()

    async def drain(self, deadline: Deadline) -> None:
        """Stops the intake and waits until nothing runs any more, or the deadline passes."""
        await self.stop()
        if self._tasks:
            await asyncio.wait(self._tasks, timeout=max(deadline.remaining_s, 0.0))

    async def close(self) -> None:
        """Stops the intake and cancels what still runs; its callers are told `unavailable`."""
        await self.stop()
        await cancelled(*self._tasks)

    async def __aenter__(self) -> Registration[Q, R]:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    def _on_request(self, raw: Raw) -> None:
        self.requests += 1
        if not raw.reply:
            self.errors += 1
            self._instruments.malformed(self.to.name, "it names no reply subject")
        elif not raw.reply.startswith(OPEN_INBOX):
            # else whoever may ask could have this process publish wherever it may and the asker may not
            self.errors += 1
            self._instruments.malformed(self.to.name, "its reply subject is no inbox")
        elif len(self._tasks) >= self._limit:
            full = Overloaded(f"{self.to.name} has {self._limit} requests at work", retry_after_s=1.0)
            _Answer(self._transport, raw.reply).error(full)
        else:
            task = asyncio.get_running_loop().create_task(self._handle(raw))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def _handle(self, raw: Raw) -> None:
        started = time.monotonic()
        answer = _Answer(self._transport, raw.reply)
        try:
            await self._run(raw, answer)
        except asyncio.CancelledError:
            answer.error(Unavailable(f"{self.to.name} is stopping"))
            raise
        except PdbusError as error:
            self.errors += 1
            answer.error(error)
        except Exception as error:
            log.exception("%s: the handler failed", self.to.name)
            self.errors += 1
            answer.error(error)
        finally:
            took = time.monotonic() - started
            self.busy_s += took
            self._instruments.handled.record(took, {"messaging.destination.template": self.to.subject.template})

    async def _run(self, raw: Raw, answer: _Answer) -> None:
        try:
            ctx = headers.read_context(raw.headers)
            message = decode(self.to.subject.request, raw.data)
        except InvalidRequest as error:
            self._instruments.malformed(self.to.name, error.message)
            raise
        ctx.deadline.check(f"{self.to.name} began")
        trace = headers.read_trace(raw.headers)
        with self._instruments.span(SpanKind.SERVER, "process", self.to.subject, ctx.request_id, trace):
            try:
                async with ctx.deadline.timeout() as scope:
                    if isinstance(self.to.subject, StreamRpc):
                        await self._stream(message, ctx, answer, scope)
                    else:
                        reply = await cast("Handler[Q, R]", self._handler)(message, ctx)
                        await self._transport.ready()
                        answer.send(encode(reply))
            except TimeoutError:
                if scope.expired() and answer.wanted:
                    raise DeadlineExceeded(f"the deadline passed while {self.to.name} was at work") from None
                if answer.wanted:
                    raise

    async def _stream(self, message: Q, ctx: RequestContext, answer: _Answer, scope: asyncio.Timeout) -> None:
        """One frame for each item of the handler's generator; it is closed once the caller is known to be gone."""
        loop = asyncio.get_running_loop()

        def caller_says(raw: Raw) -> None:
            if headers.ALIVE in raw.headers:
                answer.alive()
                return
            answer.wanted = False
            if not scope.expired():
                scope.reschedule(loop.time())

        generator = cast("AsyncGenerator[R, None]", cast("StreamHandler[Q, R]", self._handler)(message, ctx))
        with self._inbox.open(caller_says) as stop:
            answer.begin_stream(stop)
            try:
                async with aclosing(generator) as replies:
                    async for reply in replies:
                        answer.send(encode(reply))
                        await self._transport.writable()
                answer.end()
            finally:
                answer.stop_beating()


class _Answer:
    """The way back to one caller: a single message, or frames in sequence with signs of life between them."""

    def __init__(self, transport: Transport, subject: str) -> None:
        self.wanted = True
        self._transport = transport
        self._subject = subject
        self._stop = ""
        self._sent = 0
        self._sent_at = 0.0
        self._beat: asyncio.TimerHandle | None = None

    def begin_stream(self, stop: str) -> None:
        self._stop = stop
        self._beats()

    def send(self, body: bytes) -> None:
        if self._stop:
            self._frame(body, {})
            self._sent += 1
        else:
            self._transport.send(self._subject, body, headers=NO_HEADERS)

    def end(self) -> None:
        self._frame(b"", {headers.END: "1"})

    def error(self, error: BaseException) -> None:
        """Never raises: when it can't be sent, the caller's own deadline ends its wait."""
        if not self.wanted:
            return
        try:
            self._frame(headers.encode_error(error), {headers.ERROR: "1"})
        except PdbusError as failure:
            log.warning("an error could not be told to %s: %s", self._subject, failure.message)

    def stop_beating(self) -> None:
        if self._beat:
            self._beat.cancel()

    def _frame(self, body: bytes, marks: dict[str, str]) -> None:
        if self._stop:
            marks[headers.SEQUENCE] = str(self._sent)
        self._sent_at = time.monotonic()
        self._transport.send(self._subject, body, reply=self._stop, headers=marks)

    def alive(self) -> None:
        if self._transport.connected:
            self._frame(b"", {headers.ALIVE: "1"})

    def _beats(self) -> None:
        idle = time.monotonic() - self._sent_at
        if idle >= KEEPALIVE_S and self._transport.connected:
            self.alive()
            idle = 0.0
        self._beat = asyncio.get_running_loop().call_later(KEEPALIVE_S - idle, self._beats)
