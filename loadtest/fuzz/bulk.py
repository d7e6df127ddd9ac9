"""Bulk frames and credits: damaged, out of order, of strangers, and well-formed with fields that can't be."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from random import Random
from typing import Any

from loadtest.fuzz.noise import INTEGERS, Messages, blob, damaged, leaf, spoiled
from loadtest.fuzz.packing import pack
from pdbus.bus import bulk_frames as frames
from pdbus.bus.bulk_frames import Frame, read_frame
from pdbus.bus.bus import Bus, memory_bus
from pdbus.bus.codec import encode
from pdbus.bus.memory import MemoryBroker
from pdbus.bus.transport import Raw
from pdbus.context import Deadline
from pdbus.errors import Corrupt, PdbusError, WireError
from pdbus.messages.bulk import Credit
from pdbus.messages.decode import KvFinal
from pdbus.subjects import CREDIT, TRANSFER

_PATIENCE_S = 0.03
"""Of the stream that an input goes to: after it, whatever came, the stream has to be over."""
_MOST_CREDITS = 12
"""For one stream: each may have all its frames sent again, and each of those be answered."""
_STRANGER = CREDIT.name(address="stranger")
_FLAGS = (0, frames.ITEM_FIRST, frames.ITEM_LAST, 3, 3, 3, frames.END, frames.ABORT, frames.ALIVE, 31, 32, 255)


class Bulk:
    width = 16

    def __init__(self, receiver: Bus, sender: Bus) -> None:
        self._receiver, self._sender = receiver, sender
        self._messages = Messages({})
        self._numbers = itertools.count()

    async def one(self, rng: Random) -> bool:
        kind = rng.random()
        if kind < 0.5:
            try:
                read_frame(self._frame(rng, 1))
            except Corrupt:
                return False
            return True
        return await (self._frames(rng) if kind < 0.85 else self._credits(rng))

    async def ends(self) -> None:
        """Nothing is open any more, and a transfer goes through."""
        assert not self._receiver.bulk.open_streams + self._sender.bulk.open_streams, "streams stay open"
        async with self._receiver.bulk.receive() as incoming:
            sending = asyncio.create_task(self._send(incoming.subject))
            got = [bytes(body) async for _, body in incoming.items(Credit, Deadline.after(5))]
            await sending
        assert got == [b"x" * 100_000, b""], "a sound transfer came out otherwise"

    async def _send(self, subject: str) -> None:
        async with self._sender.bulk.send(subject, Deadline.after(5)) as out:
            await out.item(Credit("a", 1), b"x" * 100_000)
            await out.item(Credit("b", 2), b"")

    async def _frames(self, rng: Random) -> bool:
        """A stream that is being read gets them."""
        transport = self._sender.transport
        async with self._receiver.bulk.receive() as incoming:
            number = rng.randrange(1 << 32)
            for _ in range(rng.randrange(1, 6)):
                reply = rng.choice((_STRANGER, _STRANGER, _STRANGER, _STRANGER, "", "pd.v1.cancel", "_INBOX.x.y"))
                transport.send(incoming.subject, self._frame(rng, number), reply=reply)
            transport.send(incoming.subject, _bytes(Frame(frames.ABORT, 0, number, 0, b"", b"")), reply=_STRANGER)
            try:
                async for _ in incoming.items(KvFinal, Deadline.after(_PATIENCE_S)):
                    pass
            except PdbusError:
                return False
        return True

    async def _credits(self, rng: Random) -> bool:
        """A stream that is being sent gets them in answer to its frames: else none would be of an open stream."""
        subject = TRANSFER.name(address="strange", stream=str(next(self._numbers)))
        left = _MOST_CREDITS

        def answer(raw: Raw) -> None:
            nonlocal left
            frame = read_frame(raw.data)
            left -= 1
            if left >= 0 and not frame.flags & frames.ABORT:
                self._receiver.transport.send(raw.reply, self._credit(rng, frame))

        elsewhere = rng.random() < 0.05  # then the broker says that nobody is there
        listening = await self._receiver.transport.subscribe(f"{subject}{'x' * elsewhere}", answer)
        try:
            async with self._sender.bulk.send(subject, Deadline.after(_PATIENCE_S)) as out:
                for _ in range(frames.FIRST_WINDOW_FRAMES + 2):  # more than go out without a credit
                    await out.item(Credit("a", 1), b"x" * 10)
        except PdbusError:
            return False
        finally:
            await listening.close()
        return True

    def _credit(self, rng: Random, frame: Frame) -> bytes:
        credit = self._messages.of(rng, Credit) | {"stream": str(frame.stream)}
        if rng.random() < 0.7:
            credit |= {"received": frame.sequence + rng.choice((1, 1, 1, 0, 2)), "error": None}
        if rng.random() < 0.1:
            credit["stream"] = str(rng.choice((frame.stream - 1, frame.stream + 1, -1, "é")))
        whole = pack(spoiled(rng, credit, leaf) if rng.random() < 0.15 else credit)
        return damaged(rng, whole) if rng.random() < 0.05 else whole

    def _frame(self, rng: Random, number: int) -> bytes:
        head = pack(self._messages.of(rng, KvFinal)) if rng.random() < 0.6 else blob(rng)
        body: bytes = encode(WireError("corrupt", "x")) if rng.random() < 0.2 else blob(rng)
        claimed = len(body) if rng.random() < 0.6 else rng.choice(INTEGERS) % (1 << 32)
        sequence = rng.randrange(4) if rng.random() < 0.9 else rng.choice(INTEGERS) % (1 << 32)
        stream = number if rng.random() < 0.9 else rng.randrange(1 << 32)
        whole = _bytes(Frame(rng.choice(_FLAGS), sequence, stream, claimed, head[: (1 << 16) - 1], body))
        return damaged(rng, whole) if rng.random() < 0.3 else whole


def _bytes(frame: Frame) -> bytes:
    return b"".join(map(bytes, frame.parts()))


@asynccontextmanager
async def bulk(_: Path) -> AsyncIterator[Bulk]:
    async with AsyncExitStack() as stack:
        broker = MemoryBroker()
        buses: list[Any] = [await stack.enter_async_context(memory_bus(broker)) for _ in range(2)]
        yield Bulk(*buses)
