"""Receives the KV of one lease into its pages."""

from __future__ import annotations

import asyncio
import time
from typing import TYPE_CHECKING

from pdbus.bus.codec import decode
from pdbus.context import Deadline
from pdbus.decode.leases import PageLease
from pdbus.errors import Cancelled, Corrupt, InvalidRequest
from pdbus.kv.codec import import_layer
from pdbus.messages.bulk import KV_FINAL, KvHead
from pdbus.messages.decode import KvFinal
from pdbus.subjects import KV

if TYPE_CHECKING:
    from pdbus.decode.worker import DecodeWorker


async def receive(worker: DecodeWorker, lease: PageLease, deadline: Deadline, listening: asyncio.Event) -> None:
    """Returns when the lease's KV is there, complete and sound. Sets `listening` once frames are taken.

    Raises Corrupt where anything doesn't fit, Cancelled where the lease has ended, and what the sender gave up with."""
    session, attempt = lease.key
    page_format = worker.pool.format
    subject = KV.name(worker=worker.id, session=session, attempt=str(attempt))
    async with worker.bus.bulk.receive_at(subject) as incoming:
        listening.set()
        async for head, body in incoming.items(KvHead, deadline):
            # From here to the write there is no await: nobody can free the pages in between.
            if worker.leases.get(lease.key) is not lease:
                raise Cancelled("the lease has ended")
            lease.renewed_s = time.monotonic()
            if head.layer == KV_FINAL:
                lease.finish(_final(body), page_format)
            elif lease.final:
                raise Corrupt("KV came after the final frame")
            else:
                pages = lease.take(head, body, page_format)
                import_layer(worker.pool, head.layer, pages, body)
    if not lease.final:
        raise Corrupt("the KV stream ended without its final frame")


def _final(body: bytes | bytearray | memoryview) -> KvFinal:
    try:
        return decode(KvFinal, body)
    except InvalidRequest as error:
        raise Corrupt(f"the final frame can't be read: {error.message}") from None
