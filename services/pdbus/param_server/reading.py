"""The checkpoint of this server: read once, and again only when its files have changed."""

from __future__ import annotations

import asyncio
import importlib.metadata
import logging
from collections.abc import Callable
from pathlib import Path

from pdbus.messages.common import Digest
from pdbus.model.checkpoint import Checkpoint, open_checkpoint
from pdbus.param_server.folder import read_digest, read_json, write_json
from pdbus.param_server.ingest import Ingest
from pdbus.param_server.store import BlockStore
from pdbus.weights.manifest import Manifest

log = logging.getLogger(__name__)


class CheckpointReader:
    """Reads one checkpoint into the store. `detail` tells people how far it is."""

    def __init__(self, source: str, store: BlockStore) -> None:
        self._source = source
        self._store = store
        self._memory = store.folder / "checkpoint.json"
        self._ingest: Ingest | None = None

    @property
    def name(self) -> str:
        """For people."""
        return Path(self._source).name

    @property
    def detail(self) -> str:
        if self._ingest is None:
            return f"opening {self._source}"
        done, total = self._ingest.done_bytes, self._ingest.total_bytes
        return f"reading {self._source}: {done / 1e6:.0f} of {total / 1e6:.0f} MB"

    async def manifest(self, keep: Callable[[int, Digest], bool], share: float) -> Manifest:
        """The checkpoint's manifest: the remembered one where its files are as they were, else by reading all of it.

        Raises CheckpointError where it can't be served, Unavailable where the disk refuses."""
        known = await asyncio.to_thread(self._remembered)
        return known or await self.read(keep, share)

    async def read(self, keep: Callable[[int, Digest], bool], share: float) -> Manifest:
        """Reads all of it, storing the blocks for which `keep(shard, digest)`, about this share of all.

        Raises as `manifest`. Ends the reading when cancelled."""
        checkpoint = await asyncio.to_thread(open_checkpoint, self._source)
        ingest = self._ingest = Ingest(checkpoint, self._store)
        self._store.require_room(int(ingest.total_bytes * share))
        log.info("reading %s: %.0f MB of weights", self._source, ingest.total_bytes / 1e6)
        run = asyncio.create_task(asyncio.to_thread(self._run, ingest, checkpoint, keep))
        try:
            return await asyncio.shield(run)
        except asyncio.CancelledError:
            ingest.stop.set()
            await asyncio.gather(run, return_exceptions=True)
            raise
        finally:
            self._ingest = None

    def _run(self, ingest: Ingest, checkpoint: Checkpoint, keep: Callable[[int, Digest], bool]) -> Manifest:
        fingerprint = _fingerprint(checkpoint.source.path)  # before: what changes while it is read is noticed next time
        manifest = ingest.run(keep)
        write_json(self._memory, {"fingerprint": fingerprint, "root": manifest.root.hex()})
        return manifest

    def _remembered(self) -> Manifest | None:
        path = Path(self._source).expanduser()
        path = path if path.exists() else open_checkpoint(self._source).source.path
        memory = read_json(self._memory)
        root = read_digest(memory.get("root"))
        if root is None or memory.get("fingerprint") != _fingerprint(path):
            return None
        manifest = self._store.manifest(root)
        if manifest:
            log.info("%s is unchanged: version %s", self._source, manifest.root.hex()[:12])
        return manifest


def _fingerprint(path: Path) -> list[list[object]]:
    """What must be the same for the same root: the files by name, size and mtime, and the code that reads them."""
    # One folder deeper lies how sentence-transformers pools
    folder = path if path.is_dir() else path.parent
    files = sorted([*path.iterdir(), *path.glob("*/config.json")]) if path.is_dir() else [path]
    stats = [(str(file.relative_to(folder)), file.stat()) for file in files if file.is_file()]
    version = importlib.metadata.version("pdbus")
    return [["pdbus", version], *([name, stat.st_size, stat.st_mtime_ns] for name, stat in stats)]
