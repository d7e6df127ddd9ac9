"""The receiving side of events: in order, one handler call at a time, from a bounded queue."""

from __future__ import annotations

import asyncio
import inspect
import logging
from collections.abc import Awaitable, Callable
from typing import Generic, TypeAlias, TypeVar

from pdbus.bus.codec import decode
from pdbus.bus.instruments import Instruments
from pdbus.bus.transport import Raw, Subscription, Transport
from pdbus.errors import InvalidRequest
from pdbus.subjects import ToEvent
from pdbus.tasks import cancelled

log = logging.getLogger(__name__)
Q = TypeVar("Q")

EventHandler: TypeAlias = Callable[[Q], Awaitable[None] | None]

QUEUE_EVENTS = 8192
"""Events that may wait for an asynchronous handler; later ones are dropped, and counted."""


class EventRegistration(Generic[Q]):
    """One subscription. A plain handler runs where the message is read; an asynchronous one in a task of its own."""

    def __init__(
        self, to: ToEvent[Q], handler: EventHandler[Q], transport: Transport, instruments: Instruments
    ) -> None:
        self.to = to
        self._handler = handler
        self._transport = transport
        self._instruments = instruments
        self._subscription: Subscription | None = None
        self._queue: asyncio.Queue[Q] | None = None
        self._task: asyncio.Task[None] | None = None

    async def start(self) -> None:
        if inspect.iscoroutinefunction(self._handler):
            self._queue = asyncio.Queue(QUEUE_EVENTS)
            self._task = asyncio.get_running_loop().create_task(self._work(self._queue))
        self._subscription = await self._transport.subscribe(self.to.name, self._on_event)

    @property
    def closed(self) -> bool:
        return self._subscription is None

    async def close(self) -> None:
        subscription, self._subscription = self._subscription, None
        if subscription:
            await subscription.close()
        await cancelled(self._task)

    async def __aenter__(self) -> EventRegistration[Q]:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    def _on_event(self, raw: Raw) -> None:
        try:
            message = decode(self.to.subject.message, raw.data)
        except InvalidRequest as error:
            self._instruments.malformed(raw.subject, error.message)
            return
        if self._queue is None:
            self._handler(message)  # what it raises is logged by the transport
            return
        try:
            self._queue.put_nowait(message)
        except asyncio.QueueFull:
            self._instruments.dropped(raw.subject, f"its handler is {QUEUE_EVENTS} events behind")

    async def _work(self, queue: asyncio.Queue[Q]) -> None:
        while True:
            message = await queue.get()
            try:
                done = self._handler(message)
                if done is not None:
                    await done
            except Exception:
                log.exception("the handler of %s failed", self.to.name)
