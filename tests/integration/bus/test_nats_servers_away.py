"""NATS servers that hang, are slow, go and come back: nobody hangs with them, and everybody finds the way back."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import pytest

from pdbus.bus import nats_client
from pdbus.bus.bus import Bus, connect
from pdbus.context import RequestContext
from pdbus.errors import DeadlineExceeded, Unavailable
from pdbus.messages.workers import Cancel, ResendReply
from pdbus.stack.nats_server import EmbeddedNats, embedded_nats
from pdbus.subjects import CANCEL, DECODE_RESEND
from tests.support.nats_peers import ASK, ask, client_of, hang, serve
from tests.support.until import until

Unique = Callable[[str], str]


@pytest.fixture
async def own_server(tmp_path: Path) -> AsyncIterator[EmbeddedNats]:
    """A server that the test may stop and break."""
    async with embedded_nats(tmp_path / "nats") as server:
        yield server


@pytest.fixture
async def bus(nats_url: str) -> AsyncIterator[Bus]:
    async with connect(nats_url, name="test") as bus:
        yield bus


async def test_a_hung_server_is_noticed_and_its_return_too(
    own_server: EmbeddedNats, unique: Unique, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(nats_client, "PING_EVERY_S", 0.1)
    name = unique("d")
    async with connect(own_server.url, name="test") as bus:
        await serve(bus, name)
        call = asyncio.create_task(bus.transport.barrier())
        await call
        try:
            await hang(own_server)
            started = time.monotonic()
            with pytest.raises(Unavailable):
                await bus.call(DECODE_RESEND(worker=name), ASK, RequestContext.after(60))
            assert time.monotonic() - started < 20
            assert not bus.transport.connected
            await bus.publish(CANCEL(), Cancel("r", 1, "r", ()))  # an event is dropped, and nobody hangs
        finally:
            os.kill(own_server.process.pid, signal.SIGCONT)
        assert await ask(bus, name) == ResendReply("unknown")


async def test_a_hung_server_is_given_up_with_data_unsent(
    own_server: EmbeddedNats, unique: Unique, monkeypatch: pytest.MonkeyPatch
) -> None:
    """nats-py would wait for what was not sent before it dials again, for as long as the server hangs."""
    monkeypatch.setattr(nats_client, "PING_EVERY_S", 0.1)
    name = unique("d")
    async with connect(own_server.url, name="test") as bus:
        await serve(bus, name)
        socket = client_of(bus)._transport._io_writer.transport
        try:
            await hang(own_server)
            for _ in range(16):
                bus.transport.send("test.unsent", b"x" * 900_000)
            await until(lambda: socket.get_write_buffer_size() > 0)
            started = time.monotonic()
            await until(lambda: not bus.transport.connected)
            assert time.monotonic() - started < 20
            assert socket.is_closing()
            async with asyncio.timeout(30):
                with pytest.raises(Unavailable):
                    await bus.transport.barrier()
        finally:
            os.kill(own_server.process.pid, signal.SIGCONT)
        assert await ask(bus, name) == ResendReply("unknown")


async def test_what_was_asked_of_jetstream_fails_with_the_connection(own_server: EmbeddedNats) -> None:
    """At once, and leaves nothing behind: nats-py would let it run into its timeout."""
    async with connect(own_server.url, name="test") as bus:
        await bus.logs.ensure()
        client = client_of(bus)
        try:
            await hang(own_server)
            asking = asyncio.create_task(client.request("$JS.API.INFO", b"", timeout=60))
            await until(lambda: bool(client._resp_map))
            client._transport._io_writer.transport.abort()
            async with asyncio.timeout(30):
                with pytest.raises(Unavailable):
                    await asking
            assert not client._resp_map
        finally:
            os.kill(own_server.process.pid, signal.SIGCONT)


async def test_a_server_away_for_long_is_waited_for(tmp_path: Path, unique: Unique) -> None:
    """nats-py gives up for good after 60 attempts. Requests wait until it is back, or their deadline passes."""
    name = unique("d")
    async with embedded_nats(tmp_path / "nats") as first:
        port = int(first.url.rpartition(":")[2])
        scope = connect(first.url, name="test")
        bus = await scope.__aenter__()
        await serve(bus, name)
    try:
        await until(lambda: not bus.transport.connected)
        with pytest.raises(DeadlineExceeded):
            await bus.call(DECODE_RESEND(worker=name), ASK, RequestContext.after(0.2))
        waiting = asyncio.create_task(bus.call(DECODE_RESEND(worker=name), ASK, RequestContext.after(60)))
        await asyncio.sleep(0)
        assert not waiting.done()
        async with embedded_nats(tmp_path / "nats", port=port):
            assert await waiting == ResendReply("unknown")
            assert bus.held() == {"calls": 0, "streams": 0, "serving": 0, "bulk_streams": 0}
    finally:
        await scope.__aexit__(None, None, None)


async def test_a_slow_server_is_given_more_time_at_each_attempt(
    nats_url: str, unique: Unique, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a machine that is too busy for the usual patience no attempt would ever succeed."""
    monkeypatch.setattr("pdbus.bus.nats.DIAL_S", 0.05)
    host, port = nats_url.removeprefix("nats://").split(":")

    async def pass_on(source: asyncio.StreamReader, to: asyncio.StreamWriter) -> None:
        while data := await source.read(65536):
            to.write(data)
        to.close()

    async def late(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        from_server, to_server = await asyncio.open_connection(host, int(port))
        asyncio.get_running_loop().call_later(0.12, ways.append, asyncio.create_task(pass_on(reader, to_server)))
        await asyncio.sleep(0.12)
        await pass_on(from_server, writer)

    ways: list[asyncio.Task[None]] = []
    async with await asyncio.start_server(late, "127.0.0.1", 0) as proxy:
        slow = f"nats://127.0.0.1:{proxy.sockets[0].getsockname()[1]}"
        async with connect(slow, name="test", wait_s=30) as bus:
            name = unique("d")
            await serve(bus, name)
            assert await ask(bus, name) == ResendReply("unknown")


async def test_a_late_pong_harms_nothing(own_server: EmbeddedNats, unique: Unique) -> None:
    name = unique("d")
    async with connect(own_server.url, name="test") as bus:
        await serve(bus, name)
        client = client_of(bus)
        try:
            await hang(own_server)
            with pytest.raises(Unavailable):
                await client.barrier(0.1)
        finally:
            os.kill(own_server.process.pid, signal.SIGCONT)
        assert await ask(bus, name) == ResendReply("unknown")
        assert client.alive


async def test_a_publisher_to_a_stalled_server_can_be_cancelled(own_server: EmbeddedNats) -> None:
    async with connect(own_server.url, name="test") as bus:

        async def publish() -> None:
            while True:
                bus.transport.send("test.stalled", b"x" * 500_000)
                await bus.transport.writable()

        try:
            await hang(own_server)
            task = asyncio.create_task(publish())
            client = client_of(bus)
            await until(lambda: client._transport._io_writer.transport.get_write_buffer_size() > 2_000_000)
            task.cancel()
            async with asyncio.timeout(30):
                with pytest.raises(asyncio.CancelledError):
                    await task
        finally:
            os.kill(own_server.process.pid, signal.SIGCONT)


async def test_a_restarted_server_finds_everybody_again(tmp_path: Path, unique: Unique) -> None:
    name = unique("d")
    async with embedded_nats(tmp_path / "nats") as first:
        bus_scope = connect(first.url, name="test")
        bus = await bus_scope.__aenter__()
        await serve(bus, name)
        assert await ask(bus, name) == ResendReply("unknown")
    port = int(first.url.rpartition(":")[2])
    await until(lambda: not bus.transport.connected)
    async with embedded_nats(tmp_path / "nats", port=port):
        assert await ask(bus, name) == ResendReply("unknown")
        await bus_scope.__aexit__(None, None, None)


async def test_no_server_is_a_clear_error_without_the_password(own_server: EmbeddedNats) -> None:
    port = int(own_server.url.rpartition(":")[2])
    own_server.process.terminate()
    await own_server.process.wait()
    with pytest.raises(Unavailable, match=str(port)) as caught:
        async with connect(f"nats://user:secret@127.0.0.1:{port}", name="test", wait_s=0.3):
            pass
    assert "secret" not in str(caught.value)
