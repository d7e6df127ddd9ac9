"""What follows a good message as a bulk stream: KV of a lease, blocks of an update, the value of a cache entry.

Each input opens a dialogue as a sound peer would, and then sends what does not fit: to services on a real server."""

from __future__ import annotations

import itertools
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import TYPE_CHECKING, Any

import zstandard

from loadtest.fuzz.noise import INTEGERS, blob, damaged, integer
from loadtest.fuzz.parts import Part, send_parts, spoiled_parts
from loadtest.fuzz.subjects import complete
from loadtest.fuzz.twin import MODEL
from pdbus.bus.codec import encode
from pdbus.canonical import content_digest
from pdbus.checksum import crc32
from pdbus.context import RequestContext
from pdbus.errors import PdbusError
from pdbus.kv.format import PageFormat
from pdbus.kv.prefix import tokens_digest
from pdbus.messages.bulk import KV_FINAL, CacheHead, KvHead, StagedHead
from pdbus.messages.cache import INLINE_BYTES, CachePut
from pdbus.messages.common import Sampling, Ticket
from pdbus.messages.decode import DecodeRun, KvFinal, Reserve
from pdbus.messages.param_server import Prepare, Stage, StagedBlock
from pdbus.messages.router import TokenItem
from pdbus.subjects import CACHE_PUT, DECODE_RESERVE, DECODE_RUN, KV, TRANSFER, WEIGHTS_PREPARE, WEIGHTS_STAGE
from pdbus.weights.delta import sparse

if TYPE_CHECKING:
    from loadtest.fuzz.house import House

_PATIENCE_S = 2.0
_TX_S = 300.0
_BASE = bytes(range(256)) * 4
_PROMPT = (1, 2, 3)
_FOREIGN_IDS = (-1, 1 << 20, 1 << 31, 1 << 62)
_HEADS = CacheHead(0), StagedHead(0), KvHead(1, bytes(32), 0, 0, 1)


class Streams:
    width = 4

    def __init__(self, house: House) -> None:
        self._house, self._bus = house, house.bus
        self._cards = house.cards
        self._numbers = itertools.count()
        self._tx, self._tx_until_ns = "", 0
        self._dialogues: tuple[Callable[[Random], Awaitable[bool]], ...] = (self._kv, self._blocks, self._value)

    async def one(self, rng: Random) -> bool:
        try:
            return await rng.choice(self._dialogues)(rng)
        except PdbusError as error:
            if error.code == "internal":
                raise AssertionError("a peer is told of an internal error") from error
            return False

    async def ends(self) -> None:
        self._house.check()
        await self._house.until_idle()
        await complete(self._cards["router"].url)

    async def _kv(self, rng: Random) -> bool:
        """A hand-over. Accepted: its worker took all of it for KV of the ticket."""
        card = self._cards["decode"]
        layout = PageFormat.parse(card.page_format)
        ctx = RequestContext.after(_PATIENCE_S)
        ticket = Ticket(
            f"fuzz-{self._bus.incarnation}-{next(self._numbers)}", 0, 1, "stranger", MODEL, card.roots[0], "anonymous",
            b"", _PROMPT, (), Sampling(temperature=0.0), 1, 3, (), ctx.deadline.wall_ns,
        )  # fmt: skip
        reserve = Reserve(
            ticket.request_id, 0, 1, ticket.router, ticket.root, len(_PROMPT), "prefill-1", card.page_format,
            card.compute_class, ticket.deadline_ns,
        )  # fmt: skip
        await self._bus.call(DECODE_RESERVE(worker=card.id), reserve, ctx)
        await self._bus.call(DECODE_RUN(worker=card.id), DecodeRun(ticket, "prefill-1"), ctx)
        bodies = [rng.choice((bytes, rng.randbytes))(layout.layer_bytes) for _ in range(layout.layers)]
        checksum = 0
        for body in bodies:
            checksum = crc32(body, checksum)
        parts: list[Part] = [
            (KvHead(1, ticket.root, layer, 0, len(_PROMPT)), body) for layer, body in enumerate(bodies)
        ]
        first = TokenItem(ticket.request_id, 0, 1, ticket.root, 0, (5,), cached_tokens=0)
        if rng.random() < 0.4:
            first = replace(first, **_one_of(rng, {
                "ids": (rng.choice(_FOREIGN_IDS),), "index": integer(rng) % (1 << 62), "choice": 1, "attempt": 2,
                "cached_tokens": rng.choice(INTEGERS) % (1 << 62), "finish": "moved", "request_id": "other",
            }))  # fmt: skip
        final = KvFinal(1, ticket.root, len(_PROMPT), tokens_digest(_PROMPT), len(bodies), checksum, first)
        if rng.random() < 0.3:
            final = replace(final, **_one_of(rng, {
                "tokens": rng.choice((0, 4, 1 << 40)), "frames": 0, "checksum": checksum ^ 1, "attempt": 2,
                "tokens_digest": blob(rng), "root": blob(rng),
            }))  # fmt: skip
        whole = encode(final)
        parts.append((KvHead(1, ticket.root, KV_FINAL, 3, 0), damaged(rng, whole) if rng.random() < 0.1 else whole))
        to = KV.name(worker=card.id, session=ticket.session, attempt="1")
        await self._send(rng, to, parts, ("layer", "layers", "start", "tokens", "attempt"))
        return True

    async def _blocks(self, rng: Random) -> bool:
        """Of an update. Accepted: all of them are there."""
        now_ns = time.time_ns()
        if now_ns > self._tx_until_ns - 60_000_000_000:  # few, since the log remembers each
            self._tx, self._tx_until_ns = f"fuzz-{now_ns}", now_ns + int(_TX_S * 1e9)
        contents = [_BASE if rng.random() < 0.3 else rng.randbytes(rng.choice((1, 64, len(_BASE)))) for _ in range(2)]
        blocks, parts, packer = [], [], zstandard.ZstdCompressor(level=1)
        for index, content in enumerate(contents):
            digest = content_digest(content) if rng.random() < 0.2 else rng.randbytes(32)
            base = content_digest(_BASE) if rng.random() < 0.5 else None
            form = rng.choice(("whole", "whole", "sparse", "low_rank"))
            body = sparse(_BASE, content, 4) or b"" if form == "sparse" and len(content) == len(_BASE) else content
            unpacked = rng.choice((0, 0, len(body), len(body) + 1, *INTEGERS))
            body = packer.compress(body) if rng.random() < 0.4 else body
            blocks.append(StagedBlock(digest, rng.choice((len(content), 1, 64 << 20)), form, base))  # type: ignore[arg-type]
            parts.append((StagedHead(index, unpacked), damaged(rng, body) if rng.random() < 0.4 else body))
        server, ctx = self._cards["param_server"].id, RequestContext.after(_PATIENCE_S)
        stage = Stage(self._tx, tuple(blocks), self._tx_until_ns)
        reply = await self._bus.call(WEIGHTS_STAGE(model=MODEL, server=server), stage, ctx)
        if reply.stream:
            wanted = [part for part, have in zip(parts, reply.have, strict=True) if not have]
            to = TRANSFER.name(address=reply.address, stream=reply.stream)
            await self._send(rng, to, wanted, ("index", "unpacked"))
        prepare = Prepare(self._tx, tuple(block.digest for block in blocks), self._tx_until_ns)
        return not (await self._bus.call(WEIGHTS_PREPARE(model=MODEL, server=server), prepare, ctx)).missing

    async def _value(self, rng: Random) -> bool:
        """Of a cache entry that is too large for a message. Accepted: it was taken."""
        size = INLINE_BYTES + rng.choice((1, 100, 5000))
        put = CachePut(
            rng.choice(("kv", "result", "feature", "model")), rng.randbytes(32), self._cards["decode"].roots[0],
            "tenant", blob(rng), 1000, rng.choice((size, size, size, integer(rng))),
        )  # fmt: skip
        ctx = RequestContext.after(_PATIENCE_S)
        reply = await self._bus.call(CACHE_PUT(node=self._cards["cache"].id), put, ctx)
        if not reply.stream:
            return reply.stored
        to = TRANSFER.name(address=reply.address, stream=reply.stream)
        value = rng.randbytes(16) * (size // 16) + bytes(size % 16)
        parts: list[Part] = [(CacheHead(0), value)]
        await self._send(rng, to, parts, ("index", "count", "part", "parts"))
        return True

    async def _send(self, rng: Random, subject: str, parts: list[Part], numbers: tuple[str, ...]) -> None:
        await send_parts(self._bus, subject, spoiled_parts(rng, parts, _HEADS, numbers, INTEGERS), _PATIENCE_S)


def _one_of(rng: Random, fields: dict[str, Any]) -> dict[str, Any]:
    name = rng.choice(list(fields))
    return {name: fields[name]}


@asynccontextmanager
async def streams(folder: Path) -> AsyncIterator[Streams]:
    # Only here: the engines bring torch, which no other kind needs.
    from loadtest.fuzz.house import house

    async with house(folder) as made:
        yield Streams(made)
