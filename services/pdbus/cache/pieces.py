"""Values on their way to a reader, in pieces that make good frames. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TypeAlias

from pdbus.bus.bulk_frames import FRAME_BYTES
from pdbus.messages.bulk import CacheHead

Value: TypeAlias = bytes | memoryview


def runs(sizes: Sequence[tuple[int, int, int]], parts: int, most_bytes: int) -> list[slice]:
    """Cuts values, given by (index, size, bytes to load), into runs that travel together: of neighbours, of one size,
    which `parts` divides, and up to `most_bytes` to load; a single one if it has to travel whole, or is larger.

    What needs no loading travels in one run, and so layer by layer."""
    found: list[slice] = []
    loaded = 0
    for at, (index, size, load) in enumerate(sizes):
        loaded += load
        if found and parts and not size % parts:
            run = found[-1]
            last, last_size, last_load = sizes[run.stop - 1]
            if index == last + 1 and (size, load) == (last_size, last_load) and loaded <= most_bytes:
                found[-1] = slice(run.start, at + 1)
                continue
        found.append(slice(at, at + 1))
        loaded = load
    return found


def pieces(index: int, values: Sequence[Value], parts: int) -> Iterator[tuple[CacheHead, Value]]:
    """A run of values as items of a stream: whole if it is one that can't be cut, else part by part across all."""
    size = len(values[0])
    if not parts or size % parts:
        yield CacheHead(index), values[0]
        return
    part_bytes = size // parts
    step = max(FRAME_BYTES // (part_bytes * len(values)), 1)
    most = max(FRAME_BYTES // part_bytes, 1)  # values of which a frame holds one part
    groups = -(-len(values) // most)
    width = -(-len(values) // groups)
    views = [memoryview(value) for value in values]
    for part in range(0, parts, step):
        many = min(step, parts - part)
        cut = slice(part * part_bytes, (part + many) * part_bytes)
        for at in range(0, len(views), width):
            chosen = views[at : at + width]
            body = chosen[0][cut] if len(chosen) == 1 else b"".join(view[cut] for view in chosen)
            yield CacheHead(index + at, len(chosen), part, many), body
