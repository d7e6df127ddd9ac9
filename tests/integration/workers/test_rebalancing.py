"""A decode service that is much slower than another gives answers away, and they go on there with the same text."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from pdbus.context import RequestContext
from pdbus.engine.sequence import Ended, Produced
from pdbus.engine.step import compute
from pdbus.messages.common import Ticket
from pdbus.messages.decode import DecodeRun
from pdbus.subjects import DECODE_RUN
from tests.support.asking import Router, ids
from tests.support.decode_services import SEEN_S, decode_services
from tests.support.workers import prompt_of

SLOW_S, QUICK_S = 0.25, 0.01
"""A step takes at least so long: whatever else the machine does, one is more than twice as slow."""
LENGTH = 120
"""Tokens: of 30 s there, so that none has ended before it is given away."""


@pytest.mark.slow
@pytest.mark.timeout(240)
async def test_answers_of_a_slow_service_go_on_at_a_quicker_one(
    nats_url: str, unique: Callable[[str], str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with decode_services(nats_url, unique("balance"), tmp_path, 2) as rig:
        router, (slow, quick) = rig.router, rig.services
        assert slow.worker
        assert quick.worker
        router.decode = quick.settings.id
        late_ns = time.time_ns() + 200 * 10**9
        tickets = [router.ticket(prompt_of(20 + at, seed=at), LENGTH, deadline_ns=late_ns) for at in range(3)]
        texts = [
            ids(await router.answer_local(replace(ticket, request_id=f"{at}"))) for at, ticket in enumerate(tickets)
        ]
        slow_pool = slow.worker.pool

        def paced(pool: Any, *rest: Any) -> list[Produced | Ended]:
            time.sleep(SLOW_S if pool is slow_pool else QUICK_S)
            return compute(pool, *rest)

        monkeypatch.setattr("pdbus.engine.core.compute", paced)
        beside = router.ticket(prompt_of(30, seed=9), 2000, deadline_ns=late_ns)
        await router.run_local(beside)  # else nobody knows how quick the other one is
        router.decode = slow.settings.id
        for ticket in tickets:
            await router.run_local(ticket)
        async with asyncio.timeout(SEEN_S):
            moved = await _first_moved(router, tickets)
        assert moved, "one was given away"
        ticket, to = moved
        assert to == quick.settings.id
        before = ids(await router.rest(ticket))
        later = replace(ticket, attempt=2, delivered=tuple(before))
        await router.bus.call(DECODE_RUN(worker=to), DecodeRun(later, None), RequestContext.after(10))
        assert before + ids(await router.rest(later)) == texts[tickets.index(ticket)]
        assert slow.moved >= 1
        assert quick.moved == 0, "and nothing comes back"
        for one in (*tickets, beside):
            await router.cancel(one)


async def _first_moved(router: Router, tickets: list[Ticket]) -> tuple[Ticket, str] | None:
    """That one, and where it goes on."""
    found: list[tuple[Ticket, str]] = []

    def look() -> bool:
        found.extend((one, item.moved_to or "") for one in tickets for item in router.of(one) if item.finish == "moved")
        return bool(found)

    await router.until(look, SEEN_S)
    return found[0]
