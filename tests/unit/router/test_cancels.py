"""A cancel is repeated until each holder has answered or is gone, and never for longer than a bound."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest

from pdbus.bus.bus import Bus, memory_bus
from pdbus.bus.memory import MemoryBroker
from pdbus.messages.common import Sampling, Ticket
from pdbus.messages.router import TokenItem
from pdbus.messages.workers import Cancel
from pdbus.router.cancels import Cancels
from pdbus.subjects import CANCEL
from tests.support.router_rig import until


@pytest.fixture
async def bus() -> AsyncIterator[Bus]:
    async with memory_bus(MemoryBroker()) as made:
        yield made


@pytest.fixture
async def heard(bus: Bus) -> list[Cancel]:
    messages: list[Cancel] = []
    await bus.subscribe(CANCEL(), messages.append)
    return messages


def _ticket(attempt: int = 1) -> Ticket:
    return Ticket("q", 0, attempt, "r", "m", b"", "t", b"", (1,), (), Sampling(), 1, 5, (), 0)


def _answer(attempt: int = 1) -> TokenItem:
    return TokenItem("q", 0, attempt, b"", -1, (), finish="cancelled")


async def test_it_ends_with_the_last_answer(bus: Bus, heard: list[Cancel]):
    cancels = Cancels(bus, "r", lambda worker: False)
    cancels.send(_ticket(), ("p", "d"), "client_gone")
    await until(lambda: len(heard) >= 1)
    cancels.answered(_answer(), "p")
    await until(lambda: len(heard) >= 3)
    assert cancels.open == 1
    assert heard[-1].holders == ("p", "d")
    cancels.answered(_answer(), "d")
    await until(lambda: cancels.open == 0)
    count = len(heard)
    await cancels.close()
    assert len(heard) == count


async def test_the_finished_are_told_once_and_owe_no_answer(bus: Bus, heard: list[Cancel]):
    cancels = Cancels(bus, "r", lambda worker: False)
    cancels.send(_ticket(), ("p", "d"), "finished")
    assert cancels.open == 0
    await cancels.close()
    assert [message.reason for message in heard] == ["finished"]


async def test_the_dead_owe_no_answer(bus: Bus, heard: list[Cancel]):
    gone: set[str] = {"p"}
    cancels = Cancels(bus, "r", gone.__contains__)
    cancels.send(_ticket(), ("p", "d"), "deadline")
    await until(lambda: len(heard) >= 1)
    gone.add("d")
    await until(lambda: cancels.open == 0)


async def test_an_answer_to_an_older_attempt_is_not_taken_for_the_newer(bus: Bus, heard: list[Cancel]):
    cancels = Cancels(bus, "r", lambda worker: False)
    cancels.send(_ticket(1), ("d",), "peer_failed")
    cancels.send(_ticket(2), ("d",), "client_gone")
    cancels.answered(_answer(1), "d")
    assert cancels.open == 1
    cancels.answered(_answer(2), "d")
    await until(lambda: cancels.open == 0)


async def test_answers_of_strangers_change_nothing(bus: Bus):
    cancels = Cancels(bus, "r", lambda worker: False)
    cancels.answered(_answer(), "stranger")
    cancels.send(_ticket(), ("d",), "client_gone")
    cancels.answered(_answer(), "stranger")
    assert cancels.open == 1
    cancels.answered(_answer(), "d")
    await cancels.close()


async def test_silence_is_not_waited_for_beyond_the_bound(bus: Bus, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("pdbus.router.cancels._LONGEST_S", 0.2)
    cancels = Cancels(bus, "r", lambda worker: False)
    cancels.send(_ticket(), ("d",), "client_gone")
    async with asyncio.timeout(30):
        await cancels.close()
    assert cancels.open == 0
