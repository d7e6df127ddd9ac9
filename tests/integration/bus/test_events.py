"""Events and presence: the same on the twin and on a real server."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable

import pytest

from pdbus.bus import events
from pdbus.bus.presence import Fleet, Presence
from pdbus.context import Deadline
from pdbus.errors import DeadlineExceeded, TooLarge
from pdbus.messages.presence import Card, State
from pdbus.messages.router import TokenFrame
from pdbus.messages.workers import Cancel
from pdbus.subjects import ANY, CANCEL, PRESENCE, TOKENS
from tests.support.nats import BusPair

Unique = Callable[[str], str]


def frame(seq: int) -> TokenFrame:
    return TokenFrame("w", "i", seq, ())


async def flushed(pair: BusPair) -> None:
    """What the server published has been delivered to the client."""
    await pair.server.transport.barrier()
    await pair.client.transport.barrier()


@pytest.mark.parametrize("asynchronous", [False, True])
async def test_events_come_in_order_to_everyone(bus_pair: BusPair, unique: Unique, asynchronous: bool) -> None:
    got: list[int] = []
    other: list[int] = []
    done = asyncio.Event()

    def hear(heard: list[int], message: TokenFrame) -> None:
        heard.append(message.seq)
        if len(got) + len(other) == 1000:
            done.set()

    def plain(message: TokenFrame) -> None:
        hear(got, message)

    async def slow(message: TokenFrame) -> None:
        await asyncio.sleep(0)
        plain(message)

    to = TOKENS(router=unique("r"))
    await bus_pair.client.subscribe(to, slow if asynchronous else plain)
    await bus_pair.server.subscribe(to, lambda message: hear(other, message))
    for seq in range(500):
        await bus_pair.server.publish(to, frame(seq))
    async with asyncio.timeout(30):
        await done.wait()
    await bus_pair.server.transport.barrier()  # the other one's connection may be behind
    assert got == other == list(range(500))


async def test_a_wildcard_hears_every_token_value(bus_pair: BusPair, unique: Unique) -> None:
    got: list[str] = []
    name = unique("p")
    await bus_pair.client.subscribe(PRESENCE(service=ANY, id=name), lambda card: got.append(card.service))
    for service in ("router", "decode"):
        await bus_pair.server.publish(PRESENCE(service=service, id=name), Card(service, name, "i", 1, "ready", "m"))
    await flushed(bus_pair)
    assert got == ["router", "decode"]


async def test_failing_handlers_and_garbage_stop_nothing(bus_pair: BusPair, unique: Unique) -> None:
    got: list[int] = []

    def plain(message: TokenFrame) -> None:
        if message.seq == 0:
            raise RuntimeError("a bug")
        got.append(message.seq)

    done = asyncio.Event()

    async def slow(message: TokenFrame) -> None:
        if message.seq == 0:
            raise RuntimeError("a bug")
        done.set()

    to = TOKENS(router=unique("r"))
    await bus_pair.client.subscribe(to, plain)
    await bus_pair.client.subscribe(to, slow)
    bus_pair.server.transport.send(to.name, b"\xc1")
    await bus_pair.server.publish(to, frame(0))
    await bus_pair.server.publish(to, frame(1))
    async with asyncio.timeout(30):
        await done.wait()
    await flushed(bus_pair)  # the other subscription's turn may come later
    assert got == [1]
    assert bus_pair.client.malformed == 2  # once for each subscription


async def test_a_closed_subscription_hears_nothing(bus_pair: BusPair, unique: Unique) -> None:
    got: list[int] = []
    to = TOKENS(router=unique("r"))
    async with await bus_pair.client.subscribe(to, lambda message: got.append(message.seq)):
        await bus_pair.server.publish(to, frame(0))
        await flushed(bus_pair)
    await bus_pair.server.publish(to, frame(1))
    await flushed(bus_pair)
    assert got == [0]


async def test_a_handler_far_behind_loses_events_and_they_are_counted(
    bus_pair: BusPair, unique: Unique, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(events, "QUEUE_EVENTS", 10)
    release = asyncio.Event()

    async def stuck(message: Cancel) -> None:
        await release.wait()

    to = TOKENS(router=unique("r"))
    await bus_pair.client.subscribe(to, stuck)
    for seq in range(50):
        await bus_pair.server.publish(to, frame(seq))
    await flushed(bus_pair)
    assert bus_pair.client.instruments.dropped_count in (39, 40)
    release.set()


async def test_too_large_an_event_is_an_error(bus_pair: BusPair) -> None:
    with pytest.raises(TooLarge):
        await bus_pair.server.publish(CANCEL(), Cancel("r" * (2 << 20), 1, "r", ()))


async def test_the_fleet_knows_who_lives(bus_pair: BusPair, unique: Unique) -> None:
    name = unique("p")
    state: list[State] = ["starting"]

    def card(seq: int) -> Card:
        return Card("prefill", name, bus_pair.server.incarnation, seq, state[0], "m")

    changes: list[str] = []
    async with Fleet(bus_pair.client) as fleet:
        fleet.on_change(lambda: changes.append(fleet.state(name)))
        assert fleet.state(name) == "dead"
        async with Presence(bus_pair.server, card) as presence:
            await fleet.wait_for(lambda fleet: fleet.state(name) == "live", Deadline.after(30))
            assert [card.id for card in fleet.live("prefill")].count(name) == 1
            state[0] = "ready"
            await presence.announce()
            await fleet.wait_for(lambda fleet: (it := fleet.card(name)) is not None and it.state == "ready", soon())
            seq = fleet.card(name)
            await fleet.wait_for(lambda fleet: fleet.card(name) != seq, soon())  # it goes on by itself
        await fleet.wait_for(lambda fleet: fleet.state(name) == "dead", Deadline.after(30))
        assert name not in [card.id for card in fleet.live("prefill")]
        with pytest.raises(DeadlineExceeded):
            await fleet.wait_for(lambda fleet: fleet.state(name) == "live", Deadline.after(0.1))
    assert changes[0] == "live"
    assert changes[-1] == "dead"


def soon() -> Deadline:
    return Deadline.after(30)


async def test_a_card_that_can_t_be_made_does_not_silence_a_process(
    bus_pair: BusPair, unique: Unique, caplog: pytest.LogCaptureFixture
) -> None:
    name = unique("p")

    def card(seq: int) -> Card:
        if seq == 2:
            raise RuntimeError("a bug")
        return Card("prefill", name, "i", seq, "ready", "m")

    async with Fleet(bus_pair.client) as fleet, Presence(bus_pair.server, card):
        await fleet.wait_for(lambda fleet: (it := fleet.card(name)) is not None and it.seq >= 3, soon())


async def test_the_services_api_lists_the_process(bus_pair: BusPair, unique: Unique) -> None:

    name = unique("d")
    await bus_pair.server.register_micro("decode", name, {"model": "m"})
    got: list[dict[str, object]] = []
    await bus_pair.client.transport.subscribe("_INBOX.micro", lambda raw: got.append(json.loads(raw.data)))
    for verb in ("PING", "INFO", "STATS"):
        bus_pair.client.transport.send(f"$SRV.{verb}.decode.{name}", b"", reply="_INBOX.micro")
    for _ in range(2):
        await flushed(bus_pair)
        await bus_pair.client.transport.barrier()
    assert [(it["type"], it["name"], it["id"]) for it in got] == [
        (f"io.nats.micro.v1.{verb}_response", "decode", name) for verb in ("ping", "info", "stats")
    ]
