"""Values on their way to a reader, in pieces that make good frames. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TypeAlias

from pdbus.bus.bulk_frames import FRAME_BYTES
from pdbus.messages.bulk import CacheHead

Value: TypeAlias = bytes | memoryview


def runs(sizes: Sequence[tuple[int, int]], parts: int, most_bytes: int) -> list[slice]:
    """Cuts values, given by (index, size), into runs that travel together: of neighbours, of one size, which `parts`
    divides, up to `most_bytes`; a single one if it has to travel whole, or is larger."""
    found: list[slice] = []
    for at, (index, size) in enumerate(sizes):
        if found and parts and not size % parts:
            run = found[-1]
            last, last_size = sizes[run.stop - 1]
            if index == last + 1 and size == last_size and (at + 1 - run.start) * size <= most_bytes:
                found[-1] = slice(run.start, at + 1)
                continue
        found.append(slice(at, at + 1))
    return found


def pieces(index: int, values: Sequence[Value], parts: int) -> Iterator[tuple[CacheHead, Value]]:
    """A run of values as items of a stream: whole if it is one that can't be cut, else part by part across all."""
    size = len(values[0])
    if not parts or size % parts:
        yield CacheHead(index), values[0]
        return
    part_bytes = size // parts
    step = max(FRAME_BYTES // (part_bytes * len(values)), 1)
    views = [memoryview(value) for value in values]
    for part in range(0, parts, step):
        many = min(step, parts - part)
        cut = slice(part * part_bytes, (part + many) * part_bytes)
        body = views[0][cut] if len(views) == 1 else b"".join(view[cut] for view in views)
        yield CacheHead(index, len(values), part, many), body
