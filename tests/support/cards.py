"""Cards of workers, for tests of who is chosen."""

from __future__ import annotations

from pdbus.messages.presence import Card, Load
from pdbus.router.placement import Kind, Wanted
from pdbus.router.prefixes import PrefixKeys

ROOT = b"r" * 32
PAGE = 16


def card(
    service: str, id: str, *, running: int = 0, backlog: int = 0, pages_used: int = 0, seq: int = 1, **fields: object
) -> Card:
    load = Load(running=running, backlog_tokens=backlog, pages_total=100, pages_used=pages_used)
    values = {"roots": (ROOT,), "page_format": "f", "compute_class": "c"} | fields
    return Card(service, id, "i", seq, "ready", "m", load=load, **values)  # type: ignore[arg-type]


def cards(service: str, count: int, **fields: object) -> list[Card]:
    return [card(service, f"{service}-{number}", **fields) for number in range(count)]  # type: ignore[arg-type]


def keys(tokens: list[int] | range, kind: Kind = Kind("f", "c")) -> PrefixKeys:  # noqa: B008 - a constant
    return PrefixKeys(tokens, "/".join(kind).encode(), PAGE, b"")


def wanted(tokens: int | list[int] = 40, **fields: object) -> Wanted:
    ids = list(range(tokens)) if isinstance(tokens, int) else tokens
    return Wanted(len(ids), lambda kind: keys(ids, kind), **fields)  # type: ignore[arg-type]
