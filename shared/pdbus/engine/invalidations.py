"""Frees what a worker still caches of deleted versions. Keys hold the version, so a missed entry costs memory only."""

from __future__ import annotations

import asyncio
import contextlib
import logging

from pdbus.bus.bus import Bus
from pdbus.engine.core import Core
from pdbus.engine.versions import Versions
from pdbus.errors import Corrupt, PdbusError
from pdbus.subjects import INVALIDATED

log = logging.getLogger(__name__)

_RETRY_S = 1.0


async def follow_invalidations(bus: Bus, model: str, versions: Versions, core: Core) -> None:
    """Follows the log of invalidations from its beginning until cancelled, through every outage of the bus."""
    seq = 0
    while True:
        try:
            async with contextlib.aclosing(bus.logs.follow(INVALIDATED(), after=seq)) as records:
                async for record in records:
                    seq = record.seq
                    if record.entry.model == model and record.entry.action == "delete":
                        await drop_pages(record.entry.root, versions, core)
        except Corrupt as error:
            log.warning("the log of invalidations begins anew: %s", error.message)
            seq = 0
        except PdbusError as error:
            log.warning("the log of invalidations can't be read, trying again: %s", error.message)
        await asyncio.sleep(_RETRY_S)


async def drop_pages(root: bytes, versions: Versions, core: Core) -> None:
    """Drops the cached pages made from `root`, unless another loaded version has the same ones."""
    versions.forget(root)
    kv_root = versions.kv_roots.get(root)
    if kv_root is None or any(other != root and versions.kv_roots[other] == kv_root for other in versions.roots):
        return
    dropped = await core.call(lambda: core.drop_root(kv_root))
    if root not in versions.roots:
        del versions.kv_roots[root]
    log.info("version %s is deleted: %d cached pages dropped", root.hex()[:12], dropped)
