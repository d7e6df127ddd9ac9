"""From what the streams saw to figures. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from statistics import median
from typing import Any

from loadtest.markdown import markdown
from loadtest.report import percentile
from loadtest.router.flood import Flood
from loadtest.router.rig import MODEL


@dataclass(frozen=True)
class Figures:
    """Of one number of routers and streams. Latencies of whole answers, in ms."""

    routers: int
    streams: int
    requests_per_s: float
    p50_ms: float
    p99_ms: float
    first_p50_ms: float
    errors: int
    cpu_ms: dict[str, float] = field(default_factory=dict)
    """Processor time a request, by kind of process: router, workers, nats, generator, …"""


def figures(routers: int, seen: Flood, cpu_ms: Mapping[str, float] | None = None) -> Figures:
    seconds = max(seen.ended_s - seen.began_s, 1e-9)
    return Figures(
        routers=routers,
        streams=seen.streams,
        requests_per_s=len(seen.latencies_s) / seconds,
        p50_ms=percentile(seen.latencies_s, 50) * 1e3,
        p99_ms=percentile(seen.latencies_s, 99) * 1e3,
        first_p50_ms=percentile(seen.firsts_s, 50) * 1e3,
        errors=sum(seen.errors.values()),
        cpu_ms=dict(cpu_ms or {}),
    )


def pooled(rounds: Sequence[Figures]) -> Figures:
    """The median of each figure over rounds of one kind; errors add up."""
    first = rounds[0]
    names = ("requests_per_s", "p50_ms", "p99_ms", "first_p50_ms")
    medians: dict[str, Any] = {name: median(getattr(one, name) for one in rounds) for name in names}
    cpu_ms = {kind: median(one.cpu_ms[kind] for one in rounds) for kind in first.cpu_ms}
    return Figures(**(asdict(first) | medians | {"errors": sum(one.errors for one in rounds), "cpu_ms": cpu_ms}))


def render(rows: Sequence[Figures]) -> str:
    head = ["routers", "streams", "req/s", "answer p50 ms", "p99 ms", "first token p50 ms", "errors"]
    head += [f"{kind}, CPU ms/req" for kind in rows[0].cpu_ms]
    return markdown(head, [_cells(row) for row in rows])


def _cells(row: Figures) -> list[str]:
    latencies = (f"{value:.1f}" for value in (row.p50_ms, row.p99_ms, row.first_p50_ms))
    cpu_ms = (f"{used:.2f}" for used in row.cpu_ms.values())
    return [str(row.routers), str(row.streams), f"{row.requests_per_s:.0f}", *latencies, str(row.errors), *cpu_ms]


def bodies(streams: int, tokens: int) -> list[dict[str, Any]]:
    """One request for each stream."""
    common = {"model": MODEL, "max_tokens": tokens, "temperature": 0, "ignore_eos": True}
    return [common | {"prompt": f"stream {number}: tell me something"} for number in range(streams)]
