"""The parts of a bulk stream, as a peer may send them that errs or lies."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from random import Random
from typing import Any, TypeAlias

from loadtest.fuzz.noise import blob
from pdbus.bus.bus import Bus
from pdbus.context import Deadline

Part: TypeAlias = tuple[Any, bytes]
"""Its head and its body."""


async def send_parts(bus: Bus, subject: str, parts: Sequence[Part], within_s: float) -> None:
    """As a stream; raises as its sender does."""
    async with bus.bulk.send(subject, Deadline.after(within_s)) as out:
        for head, body in parts:
            await out.item(head, body)


def spoiled_parts(
    rng: Random, parts: Sequence[Part], heads: Sequence[Any], numbers: Sequence[str], integers: Sequence[int]
) -> list[Part]:
    """One gone, twice, before another, of another length, with another of its head's `numbers` or one of `heads` for
    its own; or all as it was."""
    spoiled = list(parts)
    if not spoiled or rng.random() < 0.3:
        return spoiled
    at = rng.randrange(len(spoiled))
    head, body = spoiled[at]
    match rng.randrange(6):
        case 0:
            del spoiled[at]
        case 1:
            spoiled.insert(at, spoiled[at])
        case 2:
            rng.shuffle(spoiled)
        case 3:
            others = (body[:-1], body + b"x", b"", body * 2, rng.randbytes(len(body)), blob(rng))
            spoiled[at] = head, rng.choice(others)
        case 4:
            spoiled[at] = replace(head, **{rng.choice(numbers): rng.choice(integers)}), body
        case _:
            spoiled[at] = rng.choice(heads), body
    return spoiled
