"""What the requests of each ref met is told apart, by version, and merged over routers."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from pdbus.context import RequestContext
from pdbus.errors import Unavailable
from pdbus.messages.router import RefFigures, RefStatsWanted
from pdbus.router.ref_stats import OTHERS, PINNED, RefStatistics
from pdbus.stack.canary import merged

A, B = b"\x01" * 32, b"\x02" * 32


def answer(tokens: int = 5, *, whole: bool = True, failed: bool = False, source: str = "miss") -> Any:
    return SimpleNamespace(
        whole=whole, failed=failed, source=source, first_s=1.0, outputs=[SimpleNamespace(ids=list(range(tokens)))]
    )


def served(stats: RefStatistics, ref: str | None, root: bytes, made: Any) -> None:
    with stats.request(ref) as request:
        request.root, request.answer = root, made


def refused(stats: RefStatistics) -> None:
    with stats.request("canary") as request:
        request.root = B
        raise Unavailable("no worker")


async def told(stats: RefStatistics) -> dict[tuple[str, bytes], RefFigures]:
    found = await stats.tell(RefStatsWanted(), RequestContext.after(30))
    return {(figures.ref, figures.root): figures for figures in found.refs}


async def test_requests_errors_and_latencies_are_counted_by_ref_and_version() -> None:
    stats = RefStatistics("r-1")
    served(stats, "stable", A, answer())
    served(stats, "stable", A, answer(source="hit"))
    served(stats, "stable", B, answer())
    served(stats, "canary", B, answer(whole=False, failed=True))
    with pytest.raises(Unavailable):
        refused(stats)
    found = await told(stats)
    assert (found["stable", A].requests, found["stable", A].errors) == (2, 0)
    assert len(found["stable", A].first_token_s) == len(found["stable", A].per_token_s) == 1, "a hit has no latency"
    assert found["stable", B].requests == 1
    assert (found["canary", B].requests, found["canary", B].errors) == (2, 2)


async def test_who_leaves_is_no_error_of_the_version() -> None:
    stats = RefStatistics("r-1")
    served(stats, "canary", B, answer(whole=False))
    with pytest.raises(asyncio.CancelledError), stats.request("canary"):
        raise asyncio.CancelledError
    assert await told(stats) == {}


async def test_names_in_metrics_are_bounded() -> None:
    stats = RefStatistics("r-1")
    for number in range(40):
        served(stats, f"ref{number}", A, answer())
    served(stats, None, A, answer())
    names = {name for name, _ in await told(stats)}
    assert {OTHERS, PINNED} <= names
    assert len(names) <= 18


def test_routers_are_merged_and_former_versions_left_out() -> None:
    sides = merged(
        {"canary": B, "stable": A},
        [
            RefFigures("stable", A, 3, 1, (0.1,), (0.01,)),
            RefFigures("stable", A, 2, 0, (0.2,), ()),
            RefFigures("stable", B, 100, 100),
            RefFigures("canary", B, 1, 0),
            RefFigures("gone", A, 1, 0),
        ],
    )
    assert list(sides) == ["stable", "canary"]
    assert (sides["stable"].requests, sides["stable"].errors, sides["stable"].first_token_s) == (5, 1, [0.1, 0.2])
    assert sides["canary"].requests == 1
