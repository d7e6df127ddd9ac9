"""The life of one process, in the order that the runtime states: a toy service on a real NATS server."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import pytest

from pdbus.bus.bus import connect
from pdbus.bus.presence import Fleet
from pdbus.context import Deadline, RequestContext
from pdbus.errors import Conflict, Unavailable
from pdbus.messages.presence import Card
from pdbus.messages.workers import Drain
from pdbus.subjects import DRAIN


@dataclass
class Toy:
    process: subprocess.Popen[str]

    def steps(self, until: str) -> list[str]:
        """Its steps up to and with `until`."""
        found: list[str] = []
        assert self.process.stdout is not None
        for line in self.process.stdout:
            if line.startswith("toy: "):
                found.append(line[5:].strip())
                if found[-1] == until:
                    return found
        raise AssertionError(f"ended before {until!r}: {found}")

    def rest(self) -> list[str]:
        """Its steps until it ended."""
        output, _ = self.process.communicate(timeout=100)
        return [line[5:] for line in output.splitlines() if line.startswith("toy: ")]


@pytest.fixture
def toy(nats_url: str, unique: Callable[[str], str]) -> Iterator[Callable[..., Toy]]:
    started: list[subprocess.Popen[str]] = []

    def start(kind: str = "well", url: str = nats_url, fds: tuple[int, ...] = (), **settings: str) -> Toy:
        environment = {"NATS_URL": url, "PDBUS_ID": unique("toy"), "PDBUS_TOY": kind, "OTEL_EXPORTER_OTLP_ENDPOINT": ""}
        process = subprocess.Popen(
            [sys.executable, "-m", "tests.support.toy_service"],
            env={**os.environ, **environment, **settings}, pass_fds=fds,
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        )  # fmt: skip
        started.append(process)
        return Toy(process)

    yield start
    for process in started:
        process.kill()
        process.communicate()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_ends_it_in_the_stated_order(toy: Callable[..., Toy], number: signal.Signals) -> None:
    running = toy()
    assert running.steps("card ready") == ["card starting", "start", "card ready"]
    running.process.send_signal(number)
    assert running.rest() == ["card draining", "stop_intake", "drain", "close"]
    assert running.process.returncode == 0


async def test_whoever_may_ask_for_it_by_the_bus_ends_it_likewise(toy: Callable[..., Toy], nats_url: str) -> None:
    running = toy("slow_drain", PDBUS_MODEL="asked", PDBUS_DRAIN_S="600")
    await asyncio.to_thread(running.steps, "card ready")
    async with connect(nats_url, name="test") as bus, Fleet(bus) as fleet:
        card = await _ready(fleet, "asked")
        to = DRAIN(service="toy", id=card.id)
        with pytest.raises(Conflict):  # who asks again must not hit the next life of that process
            await bus.call(to, Drain("a former life"), RequestContext.after(30))
        for _ in range(3):
            told = await bus.call(to, Drain(card.incarnation), RequestContext.after(30))
            assert told.moved == 0
        seen = fleet.card(card.id) or card
        await fleet.wait_for(lambda fleet: (fleet.card(card.id) or card).seq > seen.seq + 1, Deadline.after(100))
        running.process.terminate()  # told again it went on; a signal that comes second cuts it short
        assert (await asyncio.to_thread(running.rest))[-2:] == ["drain", "close"]
        with pytest.raises(Unavailable):
            await bus.call(to, Drain(card.incarnation), RequestContext.after(30))
    assert running.process.returncode == 0


async def _ready(fleet: Fleet, model: str) -> Card:
    """The card of the toy that has this model to itself, once it is ready."""

    def found(fleet: Fleet) -> list[Card]:
        return [card for card in fleet.cards() if card.model == model and card.state == "ready"]

    await fleet.wait_for(lambda fleet: bool(found(fleet)), Deadline.after(100))
    (card,) = found(fleet)
    return card


def test_a_start_is_interrupted_without_close(toy: Callable[..., Toy]) -> None:
    running = toy("slow_start")
    running.steps("start")
    running.process.terminate()
    assert running.rest() == []
    assert running.process.returncode == 0


def test_a_start_that_fails_ends_the_process_with_the_reason(toy: Callable[..., Toy]) -> None:
    running = toy("bad_start")
    _, errors = running.process.communicate(timeout=100)
    assert running.process.returncode == 1
    assert "this toy is broken" in errors


def test_a_service_that_failed_is_closed_without_a_drain(toy: Callable[..., Toy]) -> None:
    running = toy("fails")
    assert running.steps("close")[-3:] == ["card draining", "stop_intake", "close"]
    _, errors = running.process.communicate(timeout=100)
    assert "the engine died" in errors
    assert running.process.returncode == 1


@pytest.mark.slow
def test_a_service_that_failed_and_can_not_be_closed_ends_all_the_same(toy: Callable[..., Toy]) -> None:
    """As one may whose engine hangs in foreign code."""
    running = toy("sticks")
    assert running.steps("close")[-1] == "close"
    assert running.process.wait(60) == 1


def test_a_drain_ends_with_its_deadline(toy: Callable[..., Toy]) -> None:
    running = toy("slow_drain", PDBUS_DRAIN_S="0.3")
    running.steps("card ready")
    start = time.monotonic()
    running.process.terminate()
    assert running.rest()[-2:] == ["drain", "close"]
    assert 0.3 <= time.monotonic() - start < 60
    assert running.process.returncode == 0


def test_a_second_signal_cuts_the_drain_short(toy: Callable[..., Toy]) -> None:
    running = toy("slow_drain", PDBUS_DRAIN_S="600")
    running.steps("card ready")
    running.process.terminate()
    running.steps("drain")
    running.process.terminate()
    assert running.rest() == ["close"]
    assert running.process.returncode == 0


def test_wrong_settings_are_refused_by_name(toy: Callable[..., Toy]) -> None:
    running = toy(PDBUS_DRAIN_S="soon")
    _, errors = running.process.communicate(timeout=100)
    assert running.process.returncode == 2
    assert "PDBUS_DRAIN_S" in errors
    assert "Traceback" not in errors


def test_it_waits_for_a_nats_server_that_comes_later(toy: Callable[..., Toy], nats_url: str) -> None:
    """The server is absent at first: a port where nobody listens yet, then a relay to the real one."""
    with socket.socket() as reserved:
        reserved.bind(("127.0.0.1", 0))
        port = reserved.getsockname()[1]
        running = toy(url=f"nats://127.0.0.1:{port}")
        assert running.process.stderr is not None
        assert "connecting to NATS" in running.process.stderr.readline()
        assert running.process.poll() is None
        with _relay(reserved, nats_url):
            assert "card ready" in running.steps("card ready")
            running.process.terminate()
            assert running.rest()[-1] == "close"


def test_it_can_be_stopped_while_there_is_no_nats_server(toy: Callable[..., Toy]) -> None:
    running = toy(url="nats://127.0.0.1:9")
    assert running.process.stderr is not None
    assert "connecting to NATS" in running.process.stderr.readline()
    running.process.terminate()
    assert running.process.wait(100) == 0


def test_a_lost_launcher_ends_it_without_a_drain(toy: Callable[..., Toy]) -> None:
    read, write = os.pipe()
    running = toy("slow_drain", fds=(read,), PDBUS_LIFELINE_FD=str(read), PDBUS_DRAIN_S="600")
    os.close(read)
    running.steps("card ready")
    os.close(write)
    assert running.rest()[-1] == "close"
    assert running.process.returncode == 0


async def test_its_card_tells_what_it_is_and_goes_with_it(toy: Callable[..., Toy], nats_url: str) -> None:
    async with connect(nats_url, name="test") as bus, Fleet(bus) as fleet:
        running = toy(PDBUS_MODEL="some-model")
        card = await _ready(fleet, "some-model")
        assert (card.model, card.detail, card.load.running) == ("some-model", "playing", 1)
        assert card.host == socket.gethostname()
        assert card.bulk
        running.process.terminate()
        await fleet.wait_for(lambda seen: seen.state(card.id) == "dead", Deadline.after(100))
    assert running.process.wait(100) == 0


class _relay:
    """Passes connections to a bound socket on to another server, by a child process."""

    CODE = """
import asyncio, socket, sys
async def pump(reader, writer):
    try:
        while data := await reader.read(65536):
            writer.write(data)
            await writer.drain()
    finally:
        writer.close()
async def serve(reader, writer):
    there = await asyncio.open_connection(sys.argv[2], int(sys.argv[3]))
    await asyncio.gather(pump(reader, there[1]), pump(there[0], writer), return_exceptions=True)
async def main():
    async with await asyncio.start_server(serve, sock=socket.socket(fileno=int(sys.argv[1]))) as server:
        await server.serve_forever()
asyncio.run(main())
"""

    def __init__(self, bound: socket.socket, url: str) -> None:
        host, _, target = url.removeprefix("nats://").partition(":")
        self._fd, self._there = bound.fileno(), (host, target)

    def __enter__(self) -> None:
        command = [sys.executable, "-c", self.CODE, str(self._fd), *self._there]
        self._process = subprocess.Popen(command, pass_fds=(self._fd,))

    def __exit__(self, *_: object) -> None:
        self._process.kill()
        self._process.wait()
