"""A deleted version leaves nothing in a worker's own cache."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from pdbus.bus.bus import connect
from pdbus.engine.invalidations import follow_invalidations
from pdbus.messages.workers import Invalidated
from pdbus.subjects import INVALIDATED
from tests.support.asking import until
from tests.support.workers import LocalSource, prompt_of, rig


async def test_its_cached_pages_are_dropped_and_no_others(
    nats_url: str, source: LocalSource, unique: Callable[[str], str]
) -> None:
    async with rig(lambda: connect(nats_url, name="test"), source, name=unique("tiny")) as workers:
        router, prefill, bus = workers.router, workers.prefill, workers.prefill.bus
        await bus.logs.ensure()
        for root in source.root_of.values():
            await router.answer(router.ticket(prompt_of(80), 1, root=root))
        await workers.until_idle()
        assert prefill.core.pages.cached == 10
        work = follow_invalidations(bus, router.model, prefill.versions, prefill.core)
        following = asyncio.create_task(work)
        try:
            other = Invalidated(unique("another"), "delete", source.root_of["b"])
            await bus.logs.append(INVALIDATED(), other)
            await bus.logs.append(INVALIDATED(), Invalidated(router.model, "restore", source.root_of["b"]))
            await bus.logs.append(INVALIDATED(), Invalidated(router.model, "delete", router.root))
            await until(lambda: prefill.core.pages.cached == 5)
        finally:
            following.cancel()
            await asyncio.gather(following, return_exceptions=True)
        (again,) = await router.answer(router.ticket(prompt_of(80), 1))
        (kept,) = await router.answer(router.ticket(prompt_of(80), 1, root=source.root_of["b"]))
        assert (again.cached_tokens, kept.cached_tokens) == (0, 64)
