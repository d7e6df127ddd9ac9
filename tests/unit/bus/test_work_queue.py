"""Taking from a work queue while the server is slow, away, or has lost the queue's consumer."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import aclosing, asynccontextmanager
from typing import Any, cast

from pdbus.bus.instruments import Instruments
from pdbus.bus.jetstream import JetStream
from pdbus.bus.transport import Raw
from pdbus.bus.work import Consumer, take
from pdbus.errors import NotFound, PdbusError, Unavailable
from pdbus.subjects import JOBS
from pdbus.tasks import cancelled
from tests.support.simulated_time import simulated

_TAKERS = 20
_CREATE_S = 2.0


class _Server:
    """Makes a consumer in two seconds, one after the other, and drops what was asked for more than three ago."""

    def __init__(self) -> None:
        self.made = 0
        self.asked = 0
        self.most_at_once = 0
        self.refuses: PdbusError | None = None
        self.pull_fails: PdbusError | None = None
        self._at_once = 0
        self._disk = asyncio.Lock()

    async def ensure_consumer(self, stream: str, config: Any) -> str:
        self.asked += 1
        self._at_once += 1
        self.most_at_once = max(self.most_at_once, self._at_once)
        try:
            async with asyncio.timeout(3.0), self._disk:
                await asyncio.sleep(_CREATE_S)
        except TimeoutError:
            raise Unavailable("JetStream did not answer") from None
        finally:
            self._at_once -= 1
        if self.refuses:
            raise self.refuses
        self.made += 1
        return str(config.durable_name)

    @asynccontextmanager
    async def puller(self, stream: str, consumer: str) -> AsyncIterator[_Server]:
        yield self

    async def pull(self, wait_s: float) -> Raw | None:
        await asyncio.sleep(wait_s)
        if self.pull_fails:
            raise self.pull_fails
        return None


@asynccontextmanager
async def _taking(server: _Server) -> AsyncIterator[None]:
    to, js = JOBS(model="m"), cast(JetStream, server)
    consumer = Consumer(to, JOBS, js)

    async def taker() -> None:
        async with aclosing(take(to, JOBS, consumer, js, Instruments())) as jobs:
            await anext(jobs)

    takers = [asyncio.create_task(taker()) for _ in range(_TAKERS)]
    try:
        yield
        assert not [task for task in takers if task.done()]
    finally:
        await cancelled(*takers)


def test_a_slow_server_is_asked_for_the_consumer_once() -> None:
    """By each taker, all askings but the first would be in vain, be repeated, and hold up whatever else is asked."""

    async def run() -> None:
        server = _Server()
        async with _taking(server):
            await asyncio.sleep(60)
            assert (server.asked, server.made, server.most_at_once) == (1, 1, 1)

            server.pull_fails = Unavailable("JetStream did not answer a pull request")
            await asyncio.sleep(60)
            assert server.asked == 1  # that the server is silent says nothing of the consumer

            server.pull_fails = NotFound("the consumer is gone")
            await asyncio.sleep(5.6)  # so that each taker hears it once
            server.pull_fails = None
            await asyncio.sleep(60)
            assert (server.asked, server.made, server.most_at_once) == (2, 2, 1)

    simulated(run)


def test_what_the_server_refuses_ends_no_taker() -> None:
    async def run() -> None:
        server = _Server()
        server.refuses = PdbusError("JetStream refused: maximum consumers limit reached")
        async with _taking(server):
            await asyncio.sleep(60)
            assert server.made == 0
            assert server.asked <= 60 / (_CREATE_S + 4) + 3
            server.refuses = None
            await asyncio.sleep(10)
            assert server.made == 1

    simulated(run)
