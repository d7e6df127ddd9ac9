"""The param-server: holds its shards of every version of one model, and serves their blocks.

The start, in this order: the folder is claimed; the log is followed; the server becomes a member and answers by name;
its checkpoint is read into blocks and committed; what it lacks is fetched; it serves in the groups of whole shards.
"""

from __future__ import annotations

from contextlib import AsyncExitStack
from dataclasses import replace
from types import TracebackType
from typing import ClassVar, Self

from pdbus.bus.bus import Bus
from pdbus.bus.presence import Fleet
from pdbus.context import Deadline
from pdbus.errors import Corrupt
from pdbus.messages.presence import Card, Load
from pdbus.param_server.checkpoints import Checkpointer
from pdbus.param_server.commit import LogWriter
from pdbus.param_server.convert import Place
from pdbus.param_server.converter import Converter
from pdbus.param_server.publisher import Publisher
from pdbus.param_server.reading import CheckpointReader
from pdbus.param_server.repair import Repair
from pdbus.param_server.serving import BlockServer
from pdbus.param_server.settings import SERVICE, ParamServerSettings
from pdbus.param_server.staging import Staging
from pdbus.param_server.store import BlockStore
from pdbus.param_server.tables import Tables
from pdbus.param_server.telling import HeatTeller
from pdbus.param_server.upkeep import Upkeep
from pdbus.peers.history import HistoryFollower
from pdbus.peers.weights import BlockReader
from pdbus.runtime import Service
from pdbus.weights.blocks import SHARDS
from pdbus.weights.history import History

_LOG_S = 60.0


class ParamServerService(Service[ParamServerSettings]):
    name: ClassVar[str] = SERVICE

    def __init__(self, settings: ParamServerSettings, bus: Bus) -> None:
        super().__init__(settings, bus)
        model, me = settings.model, settings.id
        self._store = BlockStore(settings.data / "blocks", model)
        self._follower = HistoryFollower(bus, model)
        self._fleet = Fleet(bus)
        reader = BlockReader(bus, model, self._follower)
        self._writer = LogWriter(bus, model, me, self._follower, reader)
        self._server = BlockServer(bus, model, me, self._store)
        self._repair = Repair(bus, model, me, self._store, self._follower)
        self._staging = Staging(bus, model, me, self._store, self._follower, self._writer)
        self._tables = Tables(bus, model, me, self._store, self._follower)
        self._upkeep = Upkeep(
            settings, self._store, self._server, self._repair, self._staging, self._follower, self._fleet
        )
        self._checkpoint = CheckpointReader(settings.checkpoint, self._store) if settings.checkpoint else None
        place = Place(bus, model, me, self._store, self._follower, self._fleet, reader)
        self._converter = Converter(place, self._writer)
        self._starting = True
        self._life = AsyncExitStack()
        self._upkeeping = AsyncExitStack()
        """Ends before the rest: after it nothing joins a group any more."""

    async def __aenter__(self) -> Self:
        model = self.settings.model
        async with AsyncExitStack() as life:
            life.enter_context(self._store)
            await self.bus.logs.ensure()
            for part in (self._follower, self._fleet):
                await life.enter_async_context(part)
            await self._follower.caught_up(Deadline.after(_LOG_S))
            self._follower.on_change(self._on_change)
            await self._writer.join(Deadline.after(_LOG_S))
            await life.enter_async_context(self._server)
            await life.enter_async_context(self._staging)
            await life.enter_async_context(HeatTeller(self.bus, model, self.settings.id, self._server.heat))
            if self._checkpoint:
                await self._commit(self._checkpoint)
            checkpointer = Checkpointer(self.bus, model, self._follower)
            publisher = Publisher(model, self._writer, self._follower, self._fleet, checkpointer)
            await life.enter_async_context(publisher)
            await life.enter_async_context(self._converter)
            self._starting = False
            await self._upkeep.round()
            await life.enter_async_context(self._tables)
            await self._upkeeping.enter_async_context(self._upkeep)
            life.push_async_exit(self._upkeeping)
            self._life = life.pop_all()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._life.aclose()

    async def stop_intake(self) -> None:
        await self._upkeeping.aclose()
        await self._staging.stop_intake()
        await self._tables.stop_intake()
        await self._server.stop_intake()

    async def drain(self, deadline: Deadline) -> None:
        await self._server.drain(deadline)

    def load(self) -> Load:
        return Load(running=self._server.sending, waiting=self._server.waiting, streams=self.bus.bulk.open_streams)

    def held(self) -> dict[str, int]:
        return {
            "sending": self._server.sending,
            "waiting": self._server.waiting,
            "transactions": len(self._staging.transactions),
            "stagings": self._staging.taking,
            "row_reads": self._tables.sending,
        }

    def card(self, card: Card) -> Card:
        reading = self._checkpoint.detail if self._starting and self._checkpoint else ""
        return replace(card, roots=self._upkeep.roots, detail=reading or self._upkeep.detail or self._converter.detail)

    def _on_change(self, history: History) -> None:
        """A log that begins anew knows neither this server nor its commit: a new start tells both again."""
        if history.seq == 0:
            self.fail(Corrupt("the change log was lost"))

    async def _commit(self, checkpoint: CheckpointReader) -> None:
        """Reads the checkpoint, and commits it if that is new."""
        duties = self._upkeep.duties()
        manifest = await checkpoint.manifest(lambda shard, _: shard in duties, share=len(duties) / SHARDS)
        message = f"checkpoint {checkpoint.name}"
        # What is committed is the checkpoint in fp32, whatever precision workers make of it (PDBUS_PRECISION).
        await self._writer.commit(manifest, self._store, message, Deadline.after(_LOG_S))
        self._repair.checkpoint, self._repair.checkpoint_manifest = checkpoint, manifest
