"""A decode service whose engine hangs while its event loop lives: it says so, its work ends, and it can be closed."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack
from pathlib import Path

import pytest

from pdbus.engine import progress
from pdbus.errors import Unavailable
from tests.support.asking import ids
from tests.support.decode_services import SEEN_S, DecodeServices, decode_services
from tests.support.workers import prompt_of


@pytest.fixture
def gate() -> threading.Event:
    """While it is shut, an engine that was told to hang does."""
    return threading.Event()


@pytest.fixture
async def rig(
    nats_url: str, unique: Callable[[str], str], tmp_path: Path, gate: threading.Event
) -> AsyncIterator[DecodeServices]:
    outlives = AsyncExitStack()
    outlives.callback(gate.set)
    async with decode_services(nats_url, unique("hung"), tmp_path, outlives=outlives) as made:
        yield made


def hang(rig: DecodeServices, gate: threading.Event) -> None:
    (service,) = rig.services
    assert service.worker
    service.worker.core.post(lambda: gate.wait(SEEN_S))


async def test_it_says_so_and_is_ready_again_where_the_engine_goes_on_after_all(
    rig: DecodeServices, gate: threading.Event
) -> None:
    (service,) = rig.services
    hang(rig, gate)
    assert "no step" in (await rig.says(service, "hung")).detail
    gate.set()
    assert not (await rig.says(service, "ready")).detail
    ticket = rig.router.ticket(prompt_of(20), 4)
    assert len(ids(await rig.router.answer_local(ticket))) == 4


async def test_one_that_stands_still_for_good_is_given_up_and_can_be_closed(
    rig: DecodeServices, gate: threading.Event, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The gate stays shut until all is closed: nobody waits for the thread."""
    (service,) = rig.services
    router, worker = rig.router, service.worker
    assert worker
    ticket, later = router.ticket(prompt_of(20), 900), router.ticket(prompt_of(20), 4)
    await router.run_local(ticket)
    await router.until(lambda: bool(router.of(ticket)))
    hang(rig, gate)
    monkeypatch.setattr(progress, "_GIVE_UP_TIMES", 1.0)
    monkeypatch.setattr(progress, "_GIVE_UP_S", 0.0)
    async with asyncio.timeout(SEEN_S):
        await service.failed.wait()
    assert isinstance(service.failure, Unavailable)
    await router.run_local(later)
    with pytest.raises(Unavailable):
        await router.rest(later)
    async with asyncio.timeout(SEEN_S):
        await rig.life.aclose()
    assert (worker.core.pages.used, len(worker.jobs), service.versions.pins) == (0, 0, 0)
