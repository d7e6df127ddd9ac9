"""The real transport: a connection to NATS that is rebuilt, with its subscriptions, whenever it is lost."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import random
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import nats.errors

from pdbus.buffer import Buffer
from pdbus.bus.nats_client import GuardedClient
from pdbus.bus.nats_dial import DIAL_S
from pdbus.bus.transport import NO_HEADERS, Callback
from pdbus.errors import Forbidden, InvalidRequest, Unauthorized, Unavailable
from pdbus.nats_access import NatsAccess, shown
from pdbus.tasks import cancelled

log = logging.getLogger(__name__)

LONGEST_BACKOFF_S = 1.0
LONGEST_DIAL_S = 8.0
TELL_EVERY_S = 5.0
_MOST_REFUSED = 256


@dataclass(slots=True, eq=False)
class NatsSubscription:
    transport: NatsTransport
    subject: str
    callback: Callback
    queue: str
    number: int = 0
    """Of the present connection."""

    async def close(self) -> None:
        await self.transport.unsubscribe(self)


class NatsTransport:
    """One connection. Messages to and from it while it is down are lost, as between any two NATS clients."""

    def __init__(self, url: str, name: str, access: NatsAccess) -> None:
        self._access = access
        self.inbox_prefix = access.inbox()
        self._refused: set[str] = set()
        """In lower case: what was asked for in vain since the last subscription began."""
        self._refused_callbacks: list[Callable[[str], None]] = []
        self._shown = shown(url)
        self._urls = [part.strip() for part in url.split(",")]
        self._name = name
        self._client: GuardedClient | None = None
        self._connected = asyncio.Event()
        self._lost = asyncio.Event()
        self._why: Exception | None = None
        self._subscriptions: set[NatsSubscription] = set()
        self._lost_callbacks: list[Callable[[], None]] = []
        self._keeper: asyncio.Task[None] | None = None
        self._closing = False
        """A cancel in mid-dial may be lost in nats-py, and in Python 3.11's wait_for."""

    @property
    def client(self) -> GuardedClient:
        """nats-py's client of the present connection, for JetStream. Raises Unavailable while there is none."""
        if self._client is None or not self.connected:
            raise Unavailable("there is no connection to NATS")
        return self._client

    @property
    def connected(self) -> bool:
        return self._connected.is_set()

    @property
    def max_payload(self) -> int:
        return int(self._client.max_payload) if self._client else 1 << 20

    async def start(self, wait_s: float) -> None:
        """Connects, trying again for `wait_s`. Raises Unavailable."""
        await self._connect(time.monotonic() + wait_s)
        self._keeper = asyncio.get_running_loop().create_task(self._keep())

    async def close(self) -> None:
        """Closes in good order: what was sent before reaches the server."""
        self._closing = True
        await cancelled(self._keeper)
        self._connected.clear()
        if self._client:
            await self._client.shut()

    def send(self, subject: str, *parts: Buffer, reply: str = "", headers: Mapping[str, str] = NO_HEADERS) -> None:
        self.client.send(subject, *parts, reply=reply, headers=headers)

    async def writable(self) -> None:
        await self.client.writable()

    async def subscribe(self, subject: str, callback: Callback, queue: str = "") -> NatsSubscription:
        subscription = NatsSubscription(self, subject, callback, queue)
        self._subscriptions.add(subscription)
        if self.connected:  # else it is made with the connection
            self._refused.discard(subject.lower())
            subscription.number = self.client.listen(subject, callback, queue)
            with contextlib.suppress(Unavailable):  # then it is made with the next connection
                await self.barrier()
            if subject.lower() in self._refused:
                self._subscriptions.discard(subscription)
                raise Forbidden(f"NATS does not let this process listen to {subject}")
        return subscription

    async def unsubscribe(self, subscription: NatsSubscription) -> None:
        if subscription not in self._subscriptions:
            return
        self._subscriptions.discard(subscription)
        client = self._client
        if client is None or not self.connected:
            return
        client.unlisten(subscription.number)
        try:
            await client.barrier()
        except Unavailable:
            return  # the interest ended with the connection
        finally:
            client.forget(subscription.number)

    async def barrier(self) -> None:
        await self.client.barrier()

    async def ready(self) -> None:
        if not self.connected:
            await self._connected.wait()

    def on_lost(self, callback: Callable[[], None]) -> None:
        self._lost_callbacks.append(callback)

    def on_refused(self, callback: Callable[[str], None]) -> None:
        self._refused_callbacks.append(callback)

    def _on_refused(self, subject: str) -> None:
        if len(self._refused) < _MOST_REFUSED:
            self._refused.add(subject)
        for callback in self._refused_callbacks:
            callback(subject)

    def _on_lost(self, error: Exception) -> None:
        self._why = error
        self._connected.clear()
        self._lost.set()
        for callback in self._lost_callbacks:
            callback()

    async def _keep(self) -> None:
        """Dials again whenever the connection is lost, for as long as it takes."""
        while not self._closing:
            await self._lost.wait()
            self._lost.clear()
            log.warning("%s: lost the connection to NATS: %s", self._name, self._why)
            if self._client:
                await self._client.shut()
            await self._connect(None)
            log.warning("%s: connected to NATS again", self._name)

    async def _connect(self, until: float | None) -> None:
        """`until`: monotonic time at which to give up (Unavailable); None: never."""
        backoff_s, patience_s, told_at = 0.05, DIAL_S, time.monotonic()
        while True:
            client, began_s = GuardedClient(self._on_lost, self._on_refused), time.monotonic()
            try:
                if self._closing:
                    raise asyncio.CancelledError
                await client.dial(self._urls, self._name, self._access.options(), patience_s)
                if client.alive:
                    break
                raise ConnectionResetError("NATS closed the connection at once")
            except (OSError, nats.errors.Error, TimeoutError, InvalidRequest) as error:
                now = time.monotonic()
                failed_s = now - began_s
                if until is not None and isinstance(error, InvalidRequest):
                    raise
                if until is not None and "authorization" in str(error).lower():
                    raise Unauthorized(f"NATS at {self._shown} does not know this process's key") from None
                if until is not None and now + backoff_s > until:
                    raise Unavailable(f"NATS can't be reached at {self._shown}: {error}") from None
                if now - told_at > TELL_EVERY_S:
                    log.warning("%s: waiting for NATS at %s: %s", self._name, self._shown, error)
                    told_at = now
            await asyncio.sleep(backoff_s * random.uniform(0.5, 1.5))  # noqa: S311
            backoff_s = min(2 * backoff_s, LONGEST_BACKOFF_S)
            if failed_s >= patience_s:  # it was there, and too slow: on a busy machine it may be so each time
                patience_s = min(2 * patience_s, LONGEST_DIAL_S)
        self._refused.clear()
        for subscription in self._subscriptions:
            subscription.number = client.listen(subscription.subject, subscription.callback, subscription.queue)
        self._client = client
        self._lost.clear()
        self._connected.set()
