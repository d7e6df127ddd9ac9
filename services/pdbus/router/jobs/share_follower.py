"""What the logs tell of how much each tenant has there: sizes alone, never what is in them."""

from __future__ import annotations

import asyncio
import logging
from contextlib import AsyncExitStack
from typing import Any, Self

from pdbus.bus.logs import Logs
from pdbus.bus.size_tail import Size
from pdbus.errors import PdbusError
from pdbus.router.jobs.shares import FOLLOWED, Shares
from pdbus.subjects import ANY, RESULTS, Log
from pdbus.tasks import cancelled

log = logging.getLogger(__name__)

_RETRY_S = 0.5
_BESIDE_BYTES = 256
"""What each message takes beside its body: subject, headers, and the file's own."""


class ShareFollower:
    """While entered, `shares` know what is stored. Until the first look has come to its end they know less, and so let
    in more: what the streams themselves may have bounds that."""

    def __init__(self, logs: Logs, shares: Shares, streams: asyncio.Event) -> None:
        """`streams`: set once they are there."""
        self._logs, self._shares, self._streams = logs, shares, streams
        self._stack = AsyncExitStack()

    async def __aenter__(self) -> Self:
        tasks = [asyncio.create_task(self._follow(one)) for one in FOLLOWED]
        self._stack.push_async_callback(cancelled, *tasks)
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._stack.aclose()

    async def _follow(self, of: Log[Any]) -> None:
        to, seq, life = of(**dict.fromkeys(of.wanted, ANY)), 0, ""
        await self._streams.wait()

        def take(size: Size) -> None:
            self._take(of, size)

        while True:
            try:
                found = await self._logs.identity(to)
                if found != life:
                    self._shares.forget(of.stream)
                    seq, life = 0, found
                async with self._logs.sizes(to, seq, take) as tail:
                    why = await tail.lost()
                    seq = tail.seq
                log.info("the sizes of %s are followed anew: %s", of.stream, why.message)
            except PdbusError as error:
                log.warning("the sizes of %s can't be followed for now: %s", of.stream, error.message)
            await asyncio.sleep(_RETRY_S)

    def _take(self, of: Log[Any], size: Size) -> None:
        tokens = of.tokens(size.subject)
        if tokens is None:
            return
        use, tenant, taken = self._shares.uses[of.stream], tokens["tenant"], size.bytes + _BESIDE_BYTES
        if of is RESULTS:  # nothing replaces one: a name each would only take memory
            use.stored(tenant, "", taken, size.at_s)
            use.reserve(tenant, size.subject, size.reserves, size.at_s)
        else:
            use.stored(tenant, size.subject, taken, size.at_s, replaces=size.replaces)
