"""What comes back: answers and streams of a peer that lies, or of a caller's own service, to those who ask it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from functools import partial
from pathlib import Path
from random import Random
from typing import Any

from loadtest.fuzz.noise import INTEGERS, Messages, damaged, leaf, spoiled
from loadtest.fuzz.packing import pack
from loadtest.fuzz.parts import Part, send_parts, spoiled_parts
from pdbus.bus.bus import Bus, memory_bus
from pdbus.bus.codec import decode, encode
from pdbus.bus.memory import MemoryBroker
from pdbus.bus.transport import Raw
from pdbus.canonical import content_digest
from pdbus.context import RequestContext
from pdbus.errors import PdbusError
from pdbus.messages.bulk import BlockHead, CacheHead
from pdbus.messages.cache import CacheFound, CacheGet, CacheGetReply, CachePut, CachePutReply
from pdbus.messages.features import SourceReply
from pdbus.messages.param_server import BlocksReply, BlocksRequest
from pdbus.messages.router import KvIndex, KvIndexSnapshot, KvIndexWanted
from pdbus.peers.blocks import BlockFetcher, Wanted
from pdbus.peers.cache_node import CacheNode
from pdbus.peers.cache_prefix import PrefixRead
from pdbus.router.feature_subject import SubjectSource
from pdbus.router.kv_index import KvTable
from pdbus.router.prefixes import PrefixKeys
from pdbus.subjects import CACHE_GET, CACHE_PUT, KVINDEX_SNAPSHOT, TRANSFER, WEIGHT_BLOCKS_OF

_LIAR = "liar"
_OWN_SERVICE = "somebodys.features"
_PATIENCE_S = 0.3
_VALUE, _MATERIAL, _ROOT = b"abcdefgh" * 8, b"made of", bytes(32)
_KEYS = tuple(bytes([at]) * 32 for at in range(3))
_PARTS = 4
_WIRE_INTEGERS = [number for number in INTEGERS if -(1 << 63) <= number < 1 << 63]
_HEADS = CacheHead(0), BlockHead(0)


class Peers:
    width = 16

    def __init__(self, asker: Bus, liar: Bus) -> None:
        self._asker, self._liar = asker, liar
        self._messages = Messages({bytes: (_ROOT, _MATERIAL, _VALUE, *_KEYS), int: INTEGERS})
        self._rng = Random(0)
        """Of the input that began last: it draws the answers, whoever they are for."""
        self._sending: set[asyncio.Task[None]] = set()
        self._table = KvTable()
        self._fetcher = BlockFetcher(asker, lambda _: [WEIGHT_BLOCKS_OF(model="toy", server=_LIAR)])
        self._asks: tuple[Callable[[Random, RequestContext], Awaitable[object]], ...] = (
            self._look, self._prefix, self._put, self._blocks, self._features, self._index,
        )  # fmt: skip

    async def start(self) -> None:
        answers: tuple[tuple[str, Callable[[Random, Raw], tuple[Any, str, list[Part]]]], ...] = (
            (CACHE_GET(node=_LIAR).name, self._found), (CACHE_PUT(node=_LIAR).name, self._taking),
            (WEIGHT_BLOCKS_OF(model="toy", server=_LIAR).name, self._coming),
            (_OWN_SERVICE, lambda *_: (SourceReply("1", (b"x", None)), "", [])),
            (KVINDEX_SNAPSHOT(worker=_LIAR).name, lambda *_: (KvIndexSnapshot("i", 3, _VALUE), "", [])),
        )  # fmt: skip
        for subject, sound in answers:
            await self._liar.transport.subscribe(subject, partial(self._answer, sound))

    async def one(self, rng: Random) -> bool:
        ctx = RequestContext.after(_PATIENCE_S)
        self._rng = rng
        try:
            await rng.choice(self._asks)(rng, ctx)
        except PdbusError:
            return False
        return True

    async def ends(self) -> None:
        if self._sending:
            await asyncio.wait(self._sending)
        assert not self._asker.bulk.open_streams + self._liar.bulk.open_streams, "streams stay open"

    # Who asks

    async def _look(self, rng: Random, ctx: RequestContext) -> None:
        wanted = CacheGet(rng.choice(("kv", "result", "feature", "model")), _KEYS, _ROOT)
        found, _ = await CacheNode(self._asker, _LIAR).look(wanted, [_MATERIAL] * len(_KEYS), ctx)
        assert len(found) == len(_KEYS)

    async def _prefix(self, rng: Random, ctx: RequestContext) -> None:
        def take(places: Sequence[int], part: int, parts: int, body: object) -> None:
            assert all(0 <= place < len(_KEYS) for place in places)
            assert 0 <= part < part + parts <= _PARTS

        into = PrefixRead(len(_KEYS), len(_VALUE), _PARTS, take)
        into.ask(1)
        wanted = CacheGet("kv", _KEYS, _ROOT)
        await CacheNode(self._asker, _LIAR).read(wanted, [_MATERIAL] * len(_KEYS), range(len(_KEYS)), into, ctx)
        assert 0 <= into.whole <= len(_KEYS)

    async def _put(self, rng: Random, ctx: RequestContext) -> None:
        value = bytes(rng.choice((10, 100_000)))
        put = CachePut("kv", _KEYS[0], _ROOT, "t", _MATERIAL, 1000, len(value))
        await CacheNode(self._asker, _LIAR).put(put, value, ctx)

    async def _blocks(self, rng: Random, ctx: RequestContext) -> None:
        async def sink(digest: bytes, content: memoryview) -> None:
            assert content_digest(content) == digest

        wanted = [Wanted(content_digest(_VALUE + key), at) for at, key in enumerate(_KEYS)]
        await self._fetcher.fetch_some(wanted, sink, ctx)

    async def _features(self, rng: Random, ctx: RequestContext) -> None:
        source = SubjectSource(self._asker, "toy", _OWN_SERVICE)
        assert len(await source.fetch(["a", "b"], ctx)) == 2
        await source.version(ctx)

    async def _index(self, rng: Random, ctx: RequestContext) -> None:
        """And the messages that come unasked."""
        for _ in range(rng.randrange(4)):
            message = self._messages.of(rng, KvIndex) | {"worker": _LIAR, "incarnation": rng.choice("ij")}
            message["seq"] = rng.choice((*range(1, 9), message["seq"]))
            self._table.apply(decode(KvIndex, pack(message)))
        snapshot = await self._asker.call(KVINDEX_SNAPSHOT(worker=_LIAR), KvIndexWanted(), ctx)
        self._table.load(_LIAR, snapshot)
        keys = PrefixKeys(range(100), bytes(32), 16, b"")
        assert len(self._table.matching(keys, {_LIAR: "i"})) <= 1
        if self._table.keys_of(_LIAR) > 1000:
            self._table.forget_all_but(())

    # What they are told: a sound answer, the stream that follows it, and its parts

    def _found(self, rng: Random, raw: Raw) -> tuple[Any, str, list[Part]]:
        asked = decode(CacheGet, raw.data)
        streamed = bool(asked.stream) and rng.random() < 0.7
        found = CacheFound(len(_VALUE), material=_MATERIAL, value=None if streamed else _VALUE)
        parts: list[Part] = [(CacheHead(at), _VALUE) for at in range(len(asked.keys))]
        if asked.parts and rng.random() < 0.5:
            step = len(_VALUE) // asked.parts
            joined = [_VALUE[step * part : step * (part + 1)] * len(asked.keys) for part in range(asked.parts)]
            parts = [(CacheHead(0, len(asked.keys), part, 1), body) for part, body in enumerate(joined)]
        to = TRANSFER.name(address=asked.receiver, stream=asked.stream) if streamed else ""
        return CacheGetReply(_LIAR, "i", (found,) * len(asked.keys)), to, parts

    def _taking(self, rng: Random, raw: Raw) -> tuple[Any, str, list[Part]]:
        return CachePutReply(rng.random() < 0.5, self._liar.bulk.address, rng.choice(("", "no-such"))), "", []

    def _coming(self, rng: Random, raw: Raw) -> tuple[Any, str, list[Part]]:
        asked = decode(BlocksRequest, raw.data)
        contents = {content_digest(_VALUE + key): _VALUE + key for key in _KEYS}
        parts: list[Part] = [(BlockHead(at), contents[digest]) for at, digest in enumerate(asked.digests)]
        sizes = tuple(len(body) for _, body in parts)
        return BlocksReply(_LIAR, sizes), TRANSFER.name(address=asked.receiver, stream=asked.stream), parts

    def _answer(self, sound: Callable[[Random, Raw], tuple[Any, str, list[Part]]], raw: Raw) -> None:
        rng = self._rng
        reply, to, parts = sound(rng, raw)
        whole = self._as_plain(reply)
        for _ in range(rng.choice((0, 0, 1, 1, 2))):
            whole = spoiled(rng, whole, lambda r: r.choice((leaf(r), r.choice(INTEGERS), _VALUE, _MATERIAL)))
        data = damaged(rng, pack(whole)) if rng.random() < 0.1 else pack(whole)
        self._liar.transport.send(raw.reply, data)
        if to:
            numbers = type(parts[0][0]).__slots__ if parts else ()
            lied = spoiled_parts(rng, parts, _HEADS, numbers, _WIRE_INTEGERS)
            task = asyncio.get_running_loop().create_task(self._send(to, lied))
            self._sending.add(task)
            task.add_done_callback(self._sending.discard)

    def _as_plain(self, message: Any) -> Any:
        return decode(dict[str, Any], encode(message))

    async def _send(self, to: str, parts: list[Part]) -> None:
        with suppress(PdbusError):
            await send_parts(self._liar, to, parts, _PATIENCE_S)


@asynccontextmanager
async def peers(_: Path) -> AsyncIterator[Peers]:
    async with AsyncExitStack() as stack:
        broker = MemoryBroker()
        buses: list[Any] = [await stack.enter_async_context(memory_bus(broker)) for _ in range(2)]
        fuzzer = Peers(*buses)
        await fuzzer.start()
        yield fuzzer
