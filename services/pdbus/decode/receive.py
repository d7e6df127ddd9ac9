"""Receives the KV of one lease into its pages."""

from __future__ import annotations

import asyncio
import time
from typing import TYPE_CHECKING

from pdbus.buffer import Buffer
from pdbus.bus.codec import decode
from pdbus.context import Deadline
from pdbus.decode.leases import PageLease
from pdbus.errors import Cancelled, Corrupt, InvalidRequest, Unavailable
from pdbus.kv.codec import import_layer
from pdbus.messages.bulk import KV_FINAL, KvHead
from pdbus.messages.decode import KvFinal
from pdbus.subjects import KV

if TYPE_CHECKING:
    from pdbus.decode.worker import DecodeWorker


async def receive(worker: DecodeWorker, lease: PageLease, deadline: Deadline, listening: asyncio.Event) -> None:
    """Returns when the lease's KV is there, complete and sound. Sets `listening` once frames are taken.

    Raises Corrupt where anything doesn't fit, Unavailable where either end gave up, or the sender's error."""
    session, attempt = lease.key
    subject = KV.name(worker=worker.id, session=session, attempt=str(attempt))
    try:
        async with worker.bus.bulk.receive_at(subject) as incoming:
            listening.set()
            async for head, body in incoming.items(KvHead, deadline):
                _take(worker, lease, head, body)
    except Cancelled as error:
        raise Unavailable(f"the hand-over from {lease.reserve.prefill_worker} was given up: {error.message}") from None
    if not lease.final:
        raise Corrupt("the KV stream ended without its final frame")


def _take(worker: DecodeWorker, lease: PageLease, head: KvHead, body: Buffer) -> None:
    """Writes one frame. There is no await between the check and the write: nobody can free the pages in between."""
    if worker.leases.get(lease.key) is not lease:
        raise Cancelled("the lease has ended")
    lease.renewed_s = time.monotonic()
    if head.layer == KV_FINAL:
        lease.finish(_final(body), worker.pool.format)
        if recorder := worker.bus.recorder:
            session, attempt = lease.key
            recorder.put("handoff", session=session, attempt=attempt, root=lease.reserve.root)
    elif lease.final:
        raise Corrupt("KV came after the final frame")
    else:
        pages = lease.take(head, body, worker.pool.format)
        view, size = memoryview(body), len(pages) * worker.pool.format.layer_bytes
        for at in range(head.layers):
            import_layer(worker.pool, head.layer + at, pages, view[at * size : (at + 1) * size])


def _final(body: Buffer) -> KvFinal:
    try:
        return decode(KvFinal, body)
    except InvalidRequest as error:
        raise Corrupt(f"the final frame can't be read: {error.message}") from None
