"""A version is loaded part by part: two are in memory at a time, and what goes wrong with one ends the load."""

from __future__ import annotations

import asyncio
import threading
from functools import partial
from typing import Any

import numpy as np
import pytest

from pdbus.context import RequestContext
from pdbus.engine.version import _fill
from pdbus.errors import Corrupt, Unavailable
from pdbus.model.parts import Part
from tests.support.asking import until

PARTS = tuple(Part(f"layers.{index}", {f"model.layers.{index}.weight": (10,)}) for index in range(6))
ROOT = bytes(32)


class Source:
    """Says which parts were asked for; each takes a turn of the loop."""

    def __init__(self, fails_at: int = -1) -> None:
        self.asked: list[str] = []
        self._fails_at = fails_at

    async def tensors(self, root: bytes, ctx: RequestContext, names: Any, *, rows: Any, progress: Any) -> Any:
        self.asked += names
        await asyncio.sleep(0)
        if len(self.asked) - 1 == self._fails_at:
            raise Unavailable("no param-server")
        progress(20, 40)
        progress(40, 40)
        return {name: np.zeros(10, np.float32) for name in names}

    async def runs(self, *asked: Any, progress: Any) -> Any:
        raise AssertionError("the builder has no patches")


class Builder:
    parts = PARTS
    patches = ()

    def __init__(self, source: Source, fails_at: int = -1) -> None:
        self.added: list[str] = []
        self.ahead: list[int] = []
        self.go_on = threading.Event()
        self.go_on.set()
        self._source, self._fails_at = source, fails_at

    def add(self, part: Part, arrays: Any) -> None:
        self.go_on.wait(60)
        if len(self.added) == self._fails_at:
            raise Corrupt("the tensor is not one")
        self.ahead.append(len(self._source.asked) - len(self.added))
        self.added += arrays


async def fill(builder: Builder, source: Source, told: list[tuple[int, int]] | None = None) -> None:
    steps = told if told is not None else []
    progress = lambda done, total: steps.append((done, total))  # noqa: E731
    ctx = RequestContext.after(30)
    await _fill(builder, partial(source.tensors, ROOT, ctx), partial(source.runs, ROOT, ctx), progress)  # type: ignore[arg-type]


async def test_parts_are_given_in_order_and_progress_is_of_the_whole() -> None:
    source, told = Source(), list[tuple[int, int]]()
    builder = Builder(source)
    await fill(builder, source, told)
    assert builder.added == [name for part in PARTS for name in part.shapes]
    assert told == [(20 * step, 240) for step in range(1, 13)]


async def test_only_the_next_part_is_fetched_while_one_is_packed() -> None:
    source = Source()
    builder = Builder(source)
    builder.go_on.clear()
    filling = asyncio.create_task(fill(builder, source))
    await until(lambda: len(source.asked) == 2)
    for _ in range(50):  # however long packing takes
        await asyncio.sleep(0)
    assert len(source.asked) == 2
    builder.go_on.set()
    await filling
    assert max(builder.ahead) <= 2


async def test_a_part_that_does_not_come_ends_the_load() -> None:
    source = Source(fails_at=3)
    builder = Builder(source)
    with pytest.raises(Unavailable):
        await fill(builder, source)
    assert len(builder.added) <= 3


async def test_a_part_that_can_not_be_packed_ends_the_load() -> None:
    source = Source()
    with pytest.raises(Corrupt):
        await fill(Builder(source, fails_at=2), source)
    assert len(source.asked) <= 4
