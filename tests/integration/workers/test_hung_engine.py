"""A decode service whose engine hangs while its event loop lives: it says so, its work ends, and it can be closed."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack
from dataclasses import dataclass, replace
from pathlib import Path

import pytest

from pdbus.bus.bus import connect
from pdbus.bus.presence import Fleet, Presence
from pdbus.context import Deadline
from pdbus.decode.service import DecodeService
from pdbus.decode.settings import DecodeSettings
from pdbus.engine import progress
from pdbus.errors import Unavailable
from pdbus.messages.presence import Card, State
from pdbus.subjects import TOKENS
from tests.support.asking import Router, ids
from tests.support.checkpoints import tiny_checkpoint
from tests.support.living import living
from tests.support.param_servers import ParamServers
from tests.support.workers import prompt_of

SEEN_S = 30.0
"""Within which a test waits for what takes two seconds: machines may be busy."""


@dataclass
class Rig:
    service: DecodeService
    fleet: Fleet
    router: Router
    gate: threading.Event
    life: AsyncExitStack
    """The service's."""

    def hang(self) -> None:
        """The engine's thread stands still until the gate opens."""
        assert self.service.worker
        self.service.worker.core.post(self.gate.wait)

    async def says(self, state: State) -> Card:
        id_ = self.service.settings.id

        def said(fleet: Fleet) -> bool:
            card = fleet.card(id_)
            return card is not None and card.state == state

        await self.fleet.wait_for(said, Deadline.after(SEEN_S))
        card = self.fleet.card(id_)
        assert card
        return card


@pytest.fixture
async def rig(nats_url: str, unique: Callable[[str], str], tmp_path: Path) -> AsyncIterator[Rig]:
    name, gate = unique("hung"), threading.Event()
    settings = DecodeSettings(id=f"{name}-d", model=name, colocated=True, engine="torch", kv_bytes=1 << 22, threads=1)
    async with AsyncExitStack() as stack:
        enter = stack.enter_async_context
        await ParamServers(nats_url, name, tmp_path, stack).start("a", tiny_checkpoint(tmp_path / "model", "llama"))
        bus = await enter(connect(nats_url, name=name))
        router = Router(bus, f"{name}-r", name, b"", "", settings.id)
        card = Card("router", router.id, bus.incarnation, 0, "ready", name)
        await enter(Presence(bus, lambda seq: replace(card, seq=seq)))
        await bus.subscribe(TOKENS(router=router.id), router.hear)
        fleet = await enter(Fleet(bus))
        own = await enter(connect(nats_url, name=settings.id))
        stack.callback(gate.set)
        life = await enter(AsyncExitStack())
        service = await life.enter_async_context(living(DecodeService(settings, own)))
        made = Rig(service, fleet, router, gate, life)
        (router.root,) = (await made.says("ready")).roots
        await service.fleet.wait_for(lambda fleet: fleet.state(router.id) == "live", Deadline.after(SEEN_S))
        yield made


async def test_it_says_so_and_is_ready_again_where_the_engine_goes_on_after_all(rig: Rig) -> None:
    rig.hang()
    assert "no step" in (await rig.says("hung")).detail
    rig.gate.set()
    assert not (await rig.says("ready")).detail
    ticket = rig.router.ticket(prompt_of(20), 4)
    assert len(ids(await rig.router.answer_local(ticket))) == 4


async def test_one_that_stands_still_for_good_is_given_up_and_can_be_closed(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The gate stays shut until all is closed: nobody waits for the thread."""
    monkeypatch.setattr(progress, "FLOOR_S", 0.5)
    monkeypatch.setattr(progress, "_GIVE_UP_S", 0.0)
    router, worker = rig.router, rig.service.worker
    assert worker
    ticket, later = router.ticket(prompt_of(20), 900), router.ticket(prompt_of(20), 4)
    await router.run_local(ticket)
    await router.until(lambda: bool(router.of(ticket)))
    rig.hang()
    async with asyncio.timeout(SEEN_S):
        await rig.service.failed.wait()
    assert isinstance(rig.service.failure, Unavailable)
    await router.run_local(later)
    with pytest.raises(Unavailable):
        await router.rest(later)
    async with asyncio.timeout(SEEN_S):
        await rig.life.aclose()
    assert (worker.core.pages.used, len(worker.jobs), rig.service.versions.pins) == (0, 0, 0)
