"""Fetches what a param-server lacks: from the other servers by name, from its own checkpoint where they can't help."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterable, Sequence

from pdbus.bus.bus import Bus
from pdbus.context import RequestContext
from pdbus.errors import InvalidRequest, PdbusError
from pdbus.messages.common import Digest
from pdbus.param_server.holdings import Gap, add_manifests
from pdbus.param_server.reading import CheckpointReader
from pdbus.param_server.store import BlockStore
from pdbus.peers.blocks import BlockFetcher, Source, Wanted
from pdbus.peers.history import HistoryFollower
from pdbus.peers.weights import fetch_manifest
from pdbus.subjects import WEIGHT_BLOCKS_OF
from pdbus.weights.blocks import SHARDS
from pdbus.weights.manifest import Block, Manifest
from pdbus.weights.placement import ranked

log = logging.getLogger(__name__)

ROUND_BYTES = 1 << 30
"""Fetched at most before it is made durable."""
_MANIFEST_S = 5.0
_BLOCKS_S = 120.0


class Repair:
    """The ways to get blocks. None raises for what it could not get; a look at the store tells."""

    def __init__(self, bus: Bus, model: str, me: str, store: BlockStore, follower: HistoryFollower) -> None:
        self._model = model
        self._me = me
        self._store = store
        self._follower = follower
        self._fetcher = BlockFetcher(bus, self._sources)
        self.checkpoint: CheckpointReader | None = None
        self.checkpoint_manifest: Manifest | None = None
        """That it yields."""
        self.reason = ""
        """Why the last one that failed did."""

    async def manifests(self, roots: Iterable[Digest]) -> None:
        """From the other servers, all manifests of these versions."""
        for root in roots if self._others() else ():
            try:
                manifest = await fetch_manifest(self._fetcher, root, RequestContext.after(_MANIFEST_S))
            except PdbusError as error:
                self.reason = error.message
            else:
                with self._store.writing() as pack:
                    add_manifests(manifest, self._store, pack)

    async def blocks(self, blocks: Iterable[Block]) -> None:
        """From the other servers, as many of these blocks as they have, up to ROUND_BYTES."""
        if not self._others():
            self.reason = "there is no other param-server"
            return
        wanted, size = [], 0
        for block in blocks:
            if size < ROUND_BYTES:
                wanted.append(Wanted(block.digest, block.shard, block.size))
                size += block.size
        self._store.require_room(size)
        with self._store.writing() as pack:

            async def put(digest: Digest, content: memoryview) -> None:
                await asyncio.to_thread(pack.add, digest, content)

            reason = await self._fetcher.fetch_some(wanted, put, RequestContext.after(_BLOCKS_S))
            self.reason = reason or self.reason

    def in_checkpoint(self, gap: Gap) -> bool:
        """Whether the checkpoint has any of what is missing."""
        manifest = self.checkpoint_manifest
        if manifest is None:
            return False
        missing = {*gap.roots, *(block.digest for block in gap.blocks)}
        return any(block.digest in missing for block in manifest.blocks())

    async def reread(self, duties: frozenset[int]) -> None:
        """From the checkpoint, all blocks of these shards. It is given up once it yields another version."""
        if self.checkpoint is None:
            return
        try:
            manifest = await self.checkpoint.read(lambda shard, _: shard in duties, share=len(duties) / SHARDS)
        except InvalidRequest as error:
            log.warning("the checkpoint can't be read again: %s", error.message)
            self.checkpoint = None
        else:
            if manifest != self.checkpoint_manifest:
                log.warning("the checkpoint has changed since this server read it: restart it to serve the new one")
                self.checkpoint = None

    def _others(self) -> list[str]:
        return [member for member in self._follower.history.members if member != self._me]

    def _sources(self, shard: int) -> Sequence[Source]:
        return [WEIGHT_BLOCKS_OF(model=self._model, server=server) for server in ranked(shard, self._others())]
