"""Takes the KV of preempted sequences out of the pool and brings it back. Called by the engine's thread."""

from __future__ import annotations

from collections.abc import Callable

from pdbus.engine.sequence import Sequence
from pdbus.kv.codec import PagePool, export_pages, import_pages
from pdbus.kv.swap_file import SwapFile, Swapped
from pdbus.telemetry import meter


class Swap:
    """As the scheduler wants it (engine/scheduler.py). `wake`: called when something has come that was asked for."""

    def __init__(self, pool: PagePool, file: SwapFile, wake: Callable[[], None]) -> None:
        self._pool, self._file, self._wake = pool, file, wake
        self._held: dict[Sequence, Swapped] = {}
        self._pages = meter().create_counter("pdbus.kv.swapped", unit="{page}")

    def save(self, sequence: Sequence) -> bool:
        pages = self._pool.format.pages_for(sequence.computed)
        if pages > self._file.free_slots:
            return False
        swapped = self._file.save(export_pages(self._pool, sequence.hold.pages[:pages]))
        if swapped is None:
            return False
        self._held[sequence] = swapped
        self._pages.add(pages, {"direction": "out"})
        return True

    def ready(self, sequence: Sequence) -> bool:
        return self._file.fetch(self._held[sequence], self._wake)

    def restore(self, sequence: Sequence) -> None:
        swapped = self._held[sequence]
        assert swapped.body is not None
        self._pages.add(len(swapped.slots), {"direction": "in"})
        import_pages(self._pool, sequence.hold.pages[: len(swapped.slots)], swapped.body)
        self.drop(sequence)

    def drop(self, sequence: Sequence) -> None:
        self._file.free(self._held.pop(sequence))
