"""A peer on a NATS server that answers, and servers that hang."""

from __future__ import annotations

import asyncio
import os
import signal
from pathlib import Path

from pdbus.bus import nats_client
from pdbus.bus.bus import Bus
from pdbus.bus.nats import NatsTransport
from pdbus.context import Deadline, RequestContext
from pdbus.errors import Unavailable
from pdbus.messages.workers import Resend, ResendReply
from pdbus.stack.nats_server import EmbeddedNats
from pdbus.subjects import DECODE_RESEND
from tests.support.until import until

ASK = Resend("r", 0, 1, 0)


def client_of(bus: Bus) -> nats_client.GuardedClient:
    assert isinstance(bus.transport, NatsTransport)
    return bus.transport.client


async def hang(server: EmbeddedNats) -> None:
    """Until SIGCONT. A busy machine takes a while to stop all threads; until then they go on answering."""
    os.kill(server.process.pid, signal.SIGSTOP)
    threads = Path(f"/proc/{server.process.pid}/task")
    await until(lambda: all(" T " in stat.read_text().rpartition(")")[2][:4] for stat in threads.glob("*/stat")))


async def serve(bus: Bus, name: str) -> None:
    async def handler(message: Resend, ctx: RequestContext) -> ResendReply:
        return ResendReply("unknown")

    await bus.serve(DECODE_RESEND(worker=name), handler)


async def ask(bus: Bus, name: str, within_s: float = 30.0) -> ResendReply:
    """Asks again while nobody answers: the peer may be reconnecting as well."""
    deadline = Deadline.after(within_s)
    while True:
        try:
            return await bus.call(DECODE_RESEND(worker=name), ASK, RequestContext(deadline))
        except Unavailable:
            deadline.check("an answer came")
            await asyncio.sleep(0.02)
