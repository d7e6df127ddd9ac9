"""Which kind of model the worker is to serve, told by the first version that there is."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from pathlib import Path

from pdbus.context import RequestContext
from pdbus.errors import PdbusError
from pdbus.model.families import embeds
from pdbus.model.source import parse_json
from pdbus.peers.history import HistoryFollower
from pdbus.peers.weights import BlockReader

log = logging.getLogger(__name__)

_READ_S = 5.0
"""Of one version: it may be gone by now, and the next one tells as well."""
_RETRY_S = 1.0


async def model_embeds(follower: HistoryFollower, reader: BlockReader) -> bool:
    """Whether it is an encoder. Waits until there is a version whose config can be read."""
    news = asyncio.Event()
    stop_listening = follower.on_change(lambda _: news.set())
    try:
        while True:
            news.clear()
            for root in follower.history.wanted:
                try:
                    meta = await reader.meta(root, RequestContext.after(_READ_S))
                    return embeds(parse_json(Path("config.json"), meta.get("config.json", b"")))
                except PdbusError as error:
                    log.warning("the config of version %s can't be read: %s", root.hex()[:12], error.message)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(_RETRY_S):
                    await news.wait()
    finally:
        stop_listening()
