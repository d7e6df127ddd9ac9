"""The model cache of a worker: weight blocks that it has had before, on the host's disk; what that saves is counted."""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import logging
from collections.abc import AsyncIterator, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, TypeAlias

from opentelemetry.metrics import CallbackOptions, Observation

from pdbus.caching.cache_folder import CacheFolder
from pdbus.caching.worth import Name
from pdbus.canonical import content_digest
from pdbus.messages.common import Digest
from pdbus.telemetry.spans import meter
from pdbus.telemetry.tally import Tally

log = logging.getLogger(__name__)

Outcome: TypeAlias = Literal["kept", "hit", "miss"]
"""Of a block of a version that is loaded. kept: in what an older version, or a packed file, has of it already; hit: in
this cache; miss: it came from a param-server."""

_TURN_S = 2.0
_LOOK_S = 0.005


@dataclass(frozen=True, slots=True)
class Want:
    """A block that is wanted, and all the places that it fills."""

    digest: Digest
    name: Name
    places: list[memoryview]

    @property
    def nbytes(self) -> int:
        return sum(len(place) for place in self.places)


class ModelCache:
    """Blocks by digest, each checked when it is read. `folder`: None, and nothing is found or kept, but counted."""

    def __init__(self, folder: CacheFolder | None) -> None:
        self.folder = folder
        self._blocks = Tally(
            "pdbus.model_cache.blocks",
            "{block}",
            "Blocks of the versions that were loaded, by where they were.",
            "outcome",
        )
        self._bytes = Tally("pdbus.model_cache.bytes", "By", "The same in bytes.", "outcome")
        meter().create_observable_counter(
            "pdbus.model_cache.files", [self._read_files], "{file}", "Files evicted, damaged, or refused by the disk."
        )

    @classmethod
    def open(cls, path: Path | None, budget_bytes: int) -> ModelCache:
        """Without a folder, or where it can't be used, which is logged, it keeps nothing."""
        if path is None or not budget_bytes:
            return cls(None)
        try:
            return cls(CacheFolder(path, budget_bytes))
        except OSError as error:
            log.warning("the cache folder %s can't be used: %s", path, error.strerror)
            return cls(None)

    def count(self, outcome: Outcome, blocks: int, size: int) -> None:
        self._blocks.add(outcome, blocks)
        self._bytes.add(outcome, size)

    @property
    def counts(self) -> Mapping[str, int]:
        """Blocks by outcome so far."""
        return self._blocks.counts

    async def fill(self, wants: Iterable[Want]) -> list[Want]:
        """Fills what is here. Returns the rest."""
        folder = self.folder
        if folder is None:
            return list(wants)
        return await asyncio.to_thread(lambda: [want for want in wants if not _filled(folder, want)])

    async def keep(self, wants: Iterable[Want]) -> None:
        """Stores blocks whose places are filled, and were checked."""
        folder = self.folder
        if folder is None:
            return

        def write() -> None:
            for want in wants:
                if not folder.write("blocks", want.digest, want.name, want.places[0]):
                    return

        await asyncio.to_thread(write)

    @contextlib.asynccontextmanager
    async def turn(self) -> AsyncIterator[None]:
        """One task of all processes of the host fetches at a time, since the others most likely want the same; who has
        waited for long does not wait any more. More may be here now than before."""
        try:
            file = (self.folder.path / "fetching").open("wb") if self.folder else None
        except OSError:  # without the folder there is nothing to be shared
            file = None
        if file is None:
            yield
            return
        with file:
            loop = asyncio.get_running_loop()
            give_up = loop.time() + _TURN_S
            while not _locked(file.fileno()) and loop.time() < give_up:  # noqa: ASYNC110 - a lock tells nobody
                await asyncio.sleep(_LOOK_S)
            yield

    def _read_files(self, _: CallbackOptions) -> list[Observation]:
        counts = dict(self.folder.counts) if self.folder else {}
        return [Observation(count, {"outcome": outcome}) for outcome, count in counts.items()]


def _filled(folder: CacheFolder, want: Want) -> bool:
    first, *others = want.places
    if not folder.read("blocks", want.digest, want.name, first):
        return False
    if content_digest(first) != want.digest:
        folder.damaged("blocks", want.digest)
        return False
    for place in others:
        place[:] = first
    return True


def _locked(fd: int) -> bool:
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True
