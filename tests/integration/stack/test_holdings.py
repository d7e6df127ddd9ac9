"""Every process tells what it holds, from its start on."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from pdbus.bus.bus import connect
from pdbus.context import Deadline, RequestContext
from pdbus.grants import GRANTS
from pdbus.messages.debug import Holdings, HoldingsWanted
from pdbus.permissions import permissions
from pdbus.runtime.holdings import serve_holdings
from pdbus.runtime.service import Service
from pdbus.settings import Settings
from pdbus.stack.status import holdings
from pdbus.subjects import DEBUG, To
from tests.support.cards import card


class Holding(Service[Settings]):
    name = "holding"
    pages = 0

    async def __aenter__(self) -> Holding:
        return self

    async def __aexit__(self, *_: object) -> None:
        return None

    def held(self) -> dict[str, int]:
        return {"pages": self.pages}

    def kept(self) -> dict[str, int]:
        return {"entries": 7}


async def test_a_process_tells_what_it_holds_and_what_it_keeps(nats_url: str, unique: Callable[[str], str]) -> None:
    id = unique("h")
    async with connect(nats_url, name="test") as bus, connect(nats_url, name="other") as other:
        service = Holding(Settings(id=id), bus)
        asked: To[HoldingsWanted, Holdings] = DEBUG(service="holding", id=id)
        async with await serve_holdings(service):
            told = await other.call(asked, HoldingsWanted(), RequestContext.after(30))
            assert (told.id, told.incarnation) == (id, bus.incarnation)
            assert told.leaked == {}, "to be asked is no work in hand"
            assert told.kept["entries"] == 7
            assert min(told.kept[name] for name in ("tasks", "threads", "files", "rss_bytes")) > 0

            service.pages = 3
            async with bus.bulk.receive(Deadline.after(30)):
                told = await other.call(asked, HoldingsWanted(), RequestContext.after(30))
            assert told.leaked == {"pages": 3, "bulk_streams": 1}


async def test_one_that_does_not_tell_is_left_out(nats_url: str, unique: Callable[[str], str]) -> None:
    async with connect(nats_url, name="test") as bus:
        service = Holding(Settings(id=unique("h")), bus)
        async with await serve_holdings(service):
            here, gone = card("holding", service.settings.id), card("holding", unique("gone"))
            while not (told := await holdings(bus, [gone, here])):  # it does not wait for a busy machine
                pass
            assert [one.id for one in told] == [here.id]


@pytest.mark.parametrize("kind", [kind for kind, grant in GRANTS.items() if grant.service])
def test_a_process_answers_for_its_own_kind_alone(kind: str) -> None:
    asked = [one for one in permissions(kind, "_INBOX.U").subscribe if one.startswith("pd.v1.debug.")]
    assert asked == [f"pd.v1.debug.{kind}.*"]
    assert not any(one.startswith("pd.v1.debug.") for one in permissions(kind, "_INBOX.U").publish)
