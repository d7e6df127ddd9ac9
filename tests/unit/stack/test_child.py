"""Supervision of one process, on real ones."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

from pdbus.native.cores import ledger
from pdbus.stack import child as child_module
from pdbus.stack.child import Child, Inherited, backoff_s, how
from pdbus.stack.folder import alive
from pdbus.stack.launcher import lifeline_pipe
from pdbus.stack.logfiles import LogFile
from pdbus.stack.plan import ProcessPlan


@dataclass(frozen=True)
class Script(ProcessPlan):
    """A child that runs a line of Python."""

    code: str = ""

    @property
    def command(self) -> list[str]:
        return [sys.executable, "-c", self.code]


WAIT = """
import signal, sys
signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
print("up", flush=True)
signal.pause()
"""
STUBBORN = """
import signal
signal.signal(signal.SIGTERM, signal.SIG_IGN)
print("up", flush=True)
while True:
    signal.pause()
"""
TELL = """
import os
os.fstat(int(os.environ["PDBUS_LIFELINE_FD"]))
print(os.environ["PDBUS_X"])
"""

COUNT = """
import os, pathlib
from pdbus.native.cores import Cell
print(Cell(pathlib.Path(os.environ["PDBUS_CORES_FILE"])).cores)
"""


class Watch:
    """Records what the child's owner is told."""

    def __init__(self) -> None:
        self.pids: list[int] = []
        self.deaths: list[tuple[str, float | None]] = []
        self.changed = asyncio.Event()

    def on_start(self, child: Child) -> None:
        assert child.pid is not None
        self.pids.append(child.pid)
        self.changed.set()

    def on_death(self, child: Child, what: str, again_in_s: float | None) -> None:
        self.deaths.append((what, again_in_s))
        self.changed.set()

    async def until(self, predicate: Callable[[], bool]) -> None:
        async with asyncio.timeout(30):
            while not predicate():
                self.changed.clear()
                await self.changed.wait()


@asynccontextmanager
async def _kept(tmp_path: Path, code: str, **settings: str) -> AsyncIterator[tuple[Child, Watch]]:
    watch = Watch()
    lock = os.open(tmp_path / "lock", os.O_CREAT | os.O_RDWR)
    with lifeline_pipe() as lifeline, ledger(5) as cores:
        inherited = Inherited(lifeline, lock, cores)
        plan = Script("decode", "decode-1", {"PDBUS_CORES_FILE": inherited.cores_file or "", **settings}, code)
        child = Child(plan, LogFile(tmp_path / "log"), inherited, watch.on_start, watch.on_death)
        keeping = asyncio.create_task(child.keep_running())
        try:
            yield child, watch
        finally:
            await child.stop(5.0, asyncio.Event())
            await keeping
            os.close(lock)


async def _up(child: Child) -> None:
    async with asyncio.timeout(30):
        while "up" not in child.last_lines():  # noqa: ASYNC110 - another process's state
            await asyncio.sleep(0.02)


async def test_it_is_stopped_by_sigterm_and_not_started_again(tmp_path: Path) -> None:
    async with _kept(tmp_path, WAIT) as (child, watch):
        await watch.until(lambda: bool(watch.pids))
        await _up(child)
        assert await child.stop(60.0, asyncio.Event()) is True
        assert child.process is not None
        assert child.process.returncode == 0
    assert len(watch.pids) == 1
    assert watch.deaths == []


async def test_a_dead_child_is_started_again_and_said_so(tmp_path: Path) -> None:
    async with _kept(tmp_path, WAIT) as (child, watch):
        await watch.until(lambda: len(watch.pids) == 1)
        await _up(child)
        os.kill(watch.pids[0], signal.SIGKILL)
        await watch.until(lambda: len(watch.pids) == 2)
        what, again_in_s = watch.deaths[0]
        assert what == "killed by SIGKILL"
        assert again_in_s is not None
        assert 0 < again_in_s < 1
        await _up(child)
    assert not any(map(alive, watch.pids))


async def test_settings_that_can_not_work_are_not_tried_again(tmp_path: Path) -> None:
    async with _kept(tmp_path, "import sys; print('wrong'); sys.exit(2)") as (child, watch):
        await watch.until(lambda: bool(watch.deaths))
        assert watch.deaths == [("exit code 2", None)]
        assert child.last_lines() == ["wrong"]
    assert len(watch.pids) == 1


async def test_one_that_ignores_sigterm_is_killed_within_the_bound(tmp_path: Path) -> None:
    async with _kept(tmp_path, STUBBORN) as (child, watch):
        await watch.until(lambda: bool(watch.pids))
        await _up(child)
        assert await child.stop(0.2, asyncio.Event()) is False
        assert not alive(watch.pids[0])


async def test_hurry_cuts_a_long_patience_short(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(child_module, "_HURRY_S", 0.2)
    async with _kept(tmp_path, STUBBORN) as (child, watch):
        await watch.until(lambda: bool(watch.pids))
        await _up(child)
        hurry = asyncio.Event()
        hurry.set()
        async with asyncio.timeout(30):
            assert await child.stop(600.0, hurry) is False


async def test_a_stop_while_it_is_being_started_leaves_nothing(tmp_path: Path) -> None:
    async with _kept(tmp_path, WAIT) as (child, _):
        await asyncio.sleep(0)
        await child.stop(10.0, asyncio.Event())
        assert child.pid is None


async def test_it_gets_its_settings_and_the_lifeline(tmp_path: Path) -> None:
    async with _kept(tmp_path, TELL, PDBUS_X="7") as (child, watch):
        await watch.until(lambda: bool(watch.deaths))
        assert child.last_lines() == ["7"]


@pytest.mark.skipif(sys.platform != "linux", reason="the ledger is for the native engine, on Linux")
async def test_each_life_of_a_child_finds_the_ledger_of_cores(tmp_path: Path) -> None:
    async with _kept(tmp_path, COUNT) as (child, watch):
        await watch.until(lambda: len(watch.deaths) >= 2)
        assert child.last_lines() == ["5"]


def test_backoff_grows_and_is_bounded() -> None:
    assert backoff_s(1) < 1
    assert backoff_s(3) > backoff_s(1)
    assert max(backoff_s(n) for n in range(1, 2000, 100)) <= 36


def test_endings_are_told_by_name() -> None:
    assert how(3) == "exit code 3"
    assert how(-9) == "killed by SIGKILL"
