"""Features of a caller's own service: any responder at a NATS subject, cached under the version that it tells."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Any

import msgpack
import nats
import pytest
import torch

from pdbus.bus.bus import Bus
from pdbus.caching.feature_key import feature_name
from pdbus.client import Client
from pdbus.context import RequestContext
from pdbus.errors import Corrupt, InvalidRequest, NotFound, TooLarge, Unavailable
from pdbus.messages.features import FeaturesReply, FeaturesRequest, SourceReply, SourceRequest
from pdbus.router import feature_subject
from pdbus.router.settings import RouterSettings
from pdbus.settings import SettingsError
from pdbus.subjects import FEATURE_SOURCE, FEATURES, To
from tests.support.encoder_rig import MODEL, EncoderRig, encoder_rig
from tests.support.router_rig import until
from tests.support.workers import LocalSource

SUBJECT = "acme.features.items"


@dataclass
class Service:
    """The caller's service."""

    version: str = "1"
    items: dict[str, bytes] = field(default_factory=lambda: {f"item-{n}": b"vector %d" % n for n in range(300)})
    asked: list[tuple[str, ...]] = field(default_factory=list)
    hold: asyncio.Event | None = None
    tamper: Any = None

    async def __call__(self, message: SourceRequest, ctx: Any) -> SourceReply:
        self.asked.append(message.keys)
        reply = SourceReply(self.version, tuple(self.items.get(key) for key in message.keys))
        if self.hold and message.keys:
            await self.hold.wait()
        return self.tamper(reply) if self.tamper else reply

    @property
    def keys(self) -> list[str]:
        """That it was asked for."""
        return [key for keys in self.asked for key in keys]


@pytest.fixture
async def r(encoders: LocalSource) -> AsyncIterator[EncoderRig]:
    torch.set_num_threads(1)
    async with encoder_rig(encoders, feature_subject=SUBJECT) as made:
        yield made
        await made.until_written()


@pytest.fixture
async def service(r: EncoderRig) -> AsyncIterator[Service]:
    made = Service()
    async with await r.bus.serve(To(FEATURE_SOURCE, SUBJECT), made):
        yield made


@pytest.fixture
def client(r: EncoderRig) -> Client:
    return Client(r.bus, MODEL, timeout_s=30)


@pytest.fixture
def confirm_always(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(feature_subject, "CONFIRMED_WITHIN_S", 0.0)


async def asked_once(r: EncoderRig, keys: list[str]) -> FeaturesReply:
    """Without the client, which would ask again until its deadline."""
    return await r.bus.call(FEATURES(model=MODEL), FeaturesRequest(tuple(keys)), RequestContext.after(30))


async def test_only_what_is_missing_is_asked_for(client: Client, service: Service, r: EncoderRig):
    first = await client.features(["item-1", "item-2", "nothing"])
    assert first.values == (b"vector 1", b"vector 2", None)
    assert (first.version, first.hits) == ("1", 0)
    await r.until_written()
    again = await client.features(["item-2", "item-3", "item-1", "item-2"])
    assert again.values == (b"vector 2", b"vector 3", b"vector 1", b"vector 2")
    assert again.hits == 3
    assert service.keys == ["item-1", "item-2", "nothing", "item-3"]


async def test_many_keys_are_asked_for_in_pieces(client: Client, service: Service):
    found = await client.features([f"item-{n}" for n in range(300)])
    assert found.values == tuple(b"vector %d" % n for n in range(300))
    assert max(map(len, service.asked)) <= 128


async def test_another_version_makes_all_that_is_cached_void(
    client: Client, service: Service, r: EncoderRig, confirm_always: None
):
    await client.features(["item-1", "item-2"])
    await r.until_written()
    service.version, service.items["item-1"] = "2", b"new"
    found = await client.features(["item-1"])
    assert (found.version, found.values, found.hits) == ("2", (b"new",), 0)
    await r.until_written()
    assert (await client.features(["item-1"])).hits == 1
    found = await client.features(["item-1", "item-2"])
    assert (found.version, found.values, found.hits) == ("2", (b"new", b"vector 2"), 1)


async def test_a_version_that_changes_under_way_is_not_mixed_with_what_was_cached(
    client: Client, service: Service, r: EncoderRig
):
    await client.features(["item-1"])
    await r.until_written()
    service.version, service.items["item-1"] = "2", b"new"  # the router takes it for version 1 for some seconds more
    found = await client.features(["item-1", "item-2"])
    assert (found.version, found.values) == ("2", (b"new", b"vector 2"))


async def test_a_service_that_changes_again_and_again_is_told_so(service: Service, r: EncoderRig):
    numbers = iter(range(10_000))
    service.tamper = lambda reply: SourceReply(str(next(numbers)), reply.values)
    with pytest.raises(Unavailable, match="changed while they were read"):
        await asked_once(r, [f"item-{n}" for n in range(300)])


async def test_a_single_item_that_changed_is_deleted_by_its_name(client: Client, service: Service, r: EncoderRig):
    await client.features(["item-1", "item-2"])
    await r.until_written()
    service.items["item-1"] = b"new"
    r.entries.delete_name(feature_name(MODEL, "item-1"))
    found = await client.features(["item-1", "item-2"])
    assert (found.values, found.hits) == ((b"new", b"vector 2"), 1)


async def test_a_fill_that_raced_with_the_change_of_an_item_does_not_survive(
    client: Client, service: Service, r: EncoderRig
):
    service.hold = asyncio.Event()
    slow = asyncio.create_task(client.features(["item-1"]))
    await until(lambda: len(service.keys) == 1)
    service.items["item-1"] = b"new"
    r.entries.delete_name(feature_name(MODEL, "item-1"))
    fresh = asyncio.create_task(client.features(["item-1"]))
    await until(lambda: len(service.keys) == 2)  # it does not wait for the older answer
    service.hold.set()
    assert (await slow).values == (b"vector 1",)
    assert (await fresh).values == (b"new",)
    await r.until_written()
    again = await client.features(["item-1"])
    assert (again.values, again.hits) == ((b"new",), 1)


async def test_the_same_item_is_asked_for_once_at_a_time(client: Client, service: Service, r: EncoderRig):
    service.hold = asyncio.Event()
    asking = [asyncio.create_task(client.features(["item-1"])) for _ in range(5)]
    await until(lambda: r.waiting == 5)
    service.hold.set()
    assert {(await one).values for one in asking} == {(b"vector 1",)}
    assert service.keys == ["item-1"]


async def test_what_a_caller_may_say_of_the_cache(client: Client, service: Service, r: EncoderRig):
    await client.features(["item-1"], cache_control="no-store")
    await r.until_written()
    assert not r.entries.stored
    for _ in range(2):
        assert (await client.features(["item-1"], cache_control="no-cache")).hits == 0
        await r.until_written()
    assert len(r.entries.stored) == 1
    assert (await client.features(["item-1"])).hits == 1


async def test_without_cache_nodes_the_service_is_asked_each_time(client: Client, service: Service, r: EncoderRig):
    r.entries.down = True
    for _ in range(2):
        assert (await client.features(["item-1"])).values == (b"vector 1",)
    assert service.keys == ["item-1"] * 2


async def test_refusals(client: Client, service: Service, r: EncoderRig):
    for keys, error in ((["x" * 257], InvalidRequest), ([""], InvalidRequest), (["x"] * 1025, TooLarge)):
        with pytest.raises(error):
            await client.features(keys)
    service.tamper = lambda reply: SourceReply(reply.version, (*reply.values, b"one more"))
    with pytest.raises(Corrupt):
        await asked_once(r, ["item-1"])


async def test_a_service_that_is_not_there_is_told_so(r: EncoderRig):
    with pytest.raises(Unavailable, match="nobody serves acme"):
        await asked_once(r, ["item-1"])


async def test_without_the_setting_it_is_said_so_at_once(encoders: LocalSource):
    async with encoder_rig(encoders) as plain:
        with pytest.raises(NotFound, match="PDBUS_FEATURE_SUBJECT"):
            await Client(plain.bus, MODEL).features(["item-1"])


@pytest.mark.parametrize("subject", ["pd.v1.infer.x", "a.*", "a.>", "a b", ".a", "a..b", "$SYS.a"])
def test_a_subject_that_can_t_be_a_service_s_is_refused(subject: str):
    with pytest.raises(SettingsError, match="PDBUS_FEATURE_SUBJECT"):
        RouterSettings(feature_subject=subject)


async def test_a_plain_nats_service_will_do(nats_url: str, real_bus: Bus):
    """Without this library: msgpack in, msgpack out."""
    connection = await nats.connect(nats_url)

    async def answer(message: Any) -> None:
        keys = msgpack.unpackb(message.data)["keys"]
        values = [key.encode() if key != "nothing" else None for key in keys]
        await connection.publish(message.reply, msgpack.packb({"version": "7", "values": values}))

    await connection.subscribe("acme.plain", cb=answer)
    await connection.request("acme.plain", msgpack.packb({"keys": []}), timeout=100)  # `flush` may be ahead of it
    source = feature_subject.SubjectSource(real_bus, MODEL, "acme.plain")
    ctx = RequestContext.after(30)
    assert await source.version(ctx) == "7"
    assert [(f.version, f.value) for f in await source.fetch(["a", "nothing"], ctx)] == [("7", b"a"), ("7", None)]
    await connection.close()
