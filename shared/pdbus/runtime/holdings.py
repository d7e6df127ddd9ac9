"""What a process holds, counted: the service's own part, and what every process has."""

from __future__ import annotations

import asyncio
import os
import threading
from pathlib import Path
from typing import Any

from pdbus.bus.serving import Registration
from pdbus.context import RequestContext
from pdbus.messages.debug import Holdings, HoldingsWanted
from pdbus.runtime.service import Service
from pdbus.subjects import DEBUG


async def serve_holdings(service: Service[Any]) -> Registration[HoldingsWanted, Holdings]:
    """Answers DEBUG for the process until it is closed: also while the service starts, and while it drains."""

    async def tell(message: HoldingsWanted, ctx: RequestContext) -> Holdings:
        # the question itself is being served as well
        held = service.bus.held() | service.held()
        held["serving"] -= registration.running
        return Holdings(service.name, service.settings.id, service.bus.incarnation, held, of_process() | service.kept())

    to = DEBUG(service=service.name, id=service.settings.id)
    registration = await service.bus.serve(to, tell)
    return registration


def of_process() -> dict[str, int]:
    """Of the one that asks, from its event loop. What the system does not tell is left out."""
    found = {"tasks": len(asyncio.all_tasks()), "threads": threading.active_count()}
    try:
        found["files"] = len(os.listdir("/proc/self/fd"))
        found["rss_bytes"] = int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except OSError:
        pass
    return found
