"""The block store of a param-server: packs of blocks by digest, on local disk, mapped into memory."""

from __future__ import annotations

import itertools
import logging
import shutil
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import TracebackType
from typing import Self

from pdbus import canonical
from pdbus.errors import Corrupt, Unavailable
from pdbus.messages.common import Digest
from pdbus.param_server.disk import told
from pdbus.param_server.folder import claim
from pdbus.param_server.pack import Pack, PackWriter, remove_leftovers
from pdbus.weights.manifest import Manifest, root_layers

log = logging.getLogger(__name__)


class BlockStore:
    """Blocks by digest, in packs. May be used from any thread.

    A block's content is checked against its digest before it is written, and when it is first read after the store was
    opened; one that fails counts as absent from then on, so that it is fetched again."""

    def __init__(self, folder: Path, model: str) -> None:
        self.folder = folder
        self._model = model
        self._packs: dict[str, Pack] = {}
        self._pack_of: dict[Digest, Pack] = {}
        self._checked: set[Digest] = set()
        self.spoilt = 0
        """Blocks found damaged since the store was opened."""
        self._scrubbing: Iterator[Digest] = iter(())
        self._numbers = itertools.count(1)
        self._held = ExitStack()

    def __enter__(self) -> Self:
        """Raises Conflict or Unavailable where the folder can't be used (folder.py)."""
        with ExitStack() as held:
            held.enter_context(claim(self.folder, self._model))
            with told(self.folder):
                remove_leftovers(self.folder)
                paths = sorted(self.folder.glob("*.pack"))
                for path in paths:
                    self._open(path)
                numbers = (int(path.stem) for path in paths if path.stem.isdecimal())
                self._numbers = itertools.count(max(numbers, default=0) + 1)
            self._held = held.pop_all()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._pack_of.clear()
        self._packs.clear()
        self._held.close()

    def __contains__(self, digest: Digest) -> bool:
        return digest in self._pack_of

    @property
    def packs(self) -> tuple[Pack, ...]:
        return tuple(self._packs.values())

    def read(self, digest: Digest) -> memoryview | None:
        """The block's content; None where the store lacks it. May wait for the disk."""
        pack = self._pack_of.get(digest)
        if pack is None:
            return None
        content = pack.block(digest)
        if digest not in self._checked:
            if canonical.content_digest(content) != digest:
                log.error("block %s in %s is damaged on disk", digest.hex()[:12], self.folder)
                self._pack_of.pop(digest, None)
                self.spoilt += 1
                return None
            self._checked.add(digest)
        return content

    def scrub(self, most_bytes: int) -> None:
        """Checks the next blocks against their digests, round and round: those that went bad since they were read first
        count as absent, too. May wait for the disk."""
        done = 0
        while done < most_bytes:
            digest = next(self._scrubbing, None)
            if digest is None:
                self._scrubbing = iter(tuple(self._pack_of))
                return
            self._checked.discard(digest)
            if (content := self.read(digest)) is not None:
                done += len(content)
                self.unmap([digest])

    def unmap(self, digests: Iterable[Digest]) -> None:
        """What was read of these blocks no longer counts as this process's memory."""
        for digest in digests:
            if pack := self._pack_of.get(digest):
                pack.unmap(digest)

    def manifest(self, root: Digest) -> Manifest | None:
        """The manifest of `root`, where all of its blocks are here."""
        content = self.read(root)
        if content is None:
            return None
        found = {digest: self.read(digest) for _, digest in root_layers(bytes(content))}
        layers = {digest: bytes(layer) for digest, layer in found.items() if layer is not None}
        return Manifest.assemble(bytes(content), layers) if len(layers) == len(found) else None

    def require_room(self, size: int) -> None:
        """Raises Unavailable where the disk has no room for `size` more bytes."""
        free = shutil.disk_usage(self.folder).free
        if free < size:
            raise Unavailable(
                f"the disk of {self.folder} is full: {size / 1e6:.0f} MB are needed and {free / 1e6:.0f} MB are free; "
                "make room, or set PDBUS_DATA to another disk"
            )

    @contextmanager
    def writing(self) -> Iterator[PackWriter]:
        """A new pack of blocks that the caller has checked; what was added is there once the scope is left without an
        error. An empty one leaves no trace."""
        with PackWriter(self.folder / f"{next(self._numbers):08d}.pack") as writer:
            yield writer
            if len(writer):
                pack = writer.finish()
                self._adopt(pack)
                self._checked |= pack.spans.keys()

    def remove(self, packs: Iterable[Pack]) -> None:
        """Deletes packs, with those of their blocks that no other pack holds. Whoever reads one goes on reading.

        Raises Unavailable where the disk refuses."""
        with told(self.folder):
            for pack in packs:
                del self._packs[pack.name]
                for digest in pack.spans:
                    if self._pack_of.get(digest) is pack:
                        del self._pack_of[digest]
                        self._checked.discard(digest)
                path = self.folder / pack.name
                path.with_suffix(".index").unlink()  # first: a pack without index is a leftover
                path.unlink()

    def _open(self, path: Path) -> None:
        try:
            self._adopt(Pack.open(path))
        except Corrupt as error:
            log.error("%s; its blocks will be fetched again", error.message)
            path.with_suffix(".index").unlink()
            path.unlink()

    def _adopt(self, pack: Pack) -> None:
        self._packs[pack.name] = pack
        for digest in pack.spans:
            self._pack_of[digest] = pack
            self._checked.discard(digest)
