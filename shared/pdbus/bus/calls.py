"""Requests that wait for their one reply: until it comes, the deadline passes, or it is known that none will come."""

from __future__ import annotations

import asyncio

from pdbus.bus import headers
from pdbus.bus.inbox import Inbox
from pdbus.bus.transport import Raw, Transport
from pdbus.context import RequestContext
from pdbus.errors import DeadlineExceeded, Forbidden, Unavailable


class Calls:
    """Of one bus, by names and bytes; what they mean is the bus's."""

    def __init__(self, transport: Transport, inbox: Inbox) -> None:
        self._transport, self._inbox = transport, inbox
        self._waiting: dict[asyncio.Future[Raw], str] = {}
        """By the subject that was asked."""

    def __len__(self) -> int:
        """Requests under way."""
        return len(self._waiting)

    async def ask(self, to: str, body: bytes, ctx: RequestContext) -> Raw:
        """The reply as it came. Raises DeadlineExceeded, Unavailable, Forbidden, TooLarge."""
        ctx.deadline.check(f"{to} was asked")
        loop = asyncio.get_running_loop()
        future: asyncio.Future[Raw] = loop.create_future()

        def on_reply(raw: Raw) -> None:
            if not future.done():
                future.set_result(raw)

        def late() -> None:
            if not future.done():
                future.set_exception(DeadlineExceeded(f"{to} did not answer in time"))

        # A timer and no timeout scope: that takes eight times as long, and all that is waited for is one future.
        timer = loop.call_later(max(ctx.deadline.remaining_s, 0.0), late)
        self._waiting[future] = to
        try:
            with self._inbox.open(on_reply) as reply:
                if not self._transport.connected:
                    await self.connected(to, ctx)
                self._transport.send(to, body, reply=reply, headers=headers.request_headers(ctx))
                return await future
        finally:
            timer.cancel()
            self._waiting.pop(future, None)
            if future.done() and not future.cancelled():
                future.exception()  # it may have failed while send() raised: that one was told

    async def connected(self, to: str, ctx: RequestContext) -> None:
        """Waits until there is a connection. Raises DeadlineExceeded."""
        try:
            async with ctx.deadline.timeout():
                await self._transport.ready()
        except TimeoutError:
            raise DeadlineExceeded(f"there was no connection to ask {to}") from None

    def lost(self) -> None:
        """The connection broke."""
        for future in self._waiting:
            if not future.done():
                future.set_exception(Unavailable("the connection to NATS broke before the reply"))

    def refused(self, subject: str) -> None:
        """NATS dropped what was sent there; `subject` is in lower case."""
        for future, asked in self._waiting.items():
            if asked.lower() == subject and not future.done():
                future.set_exception(Forbidden(f"NATS does not let this process publish to {asked}"))
