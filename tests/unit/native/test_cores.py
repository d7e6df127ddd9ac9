"""Engines of one machine divide its cores: who computes alone has all of them, and nobody waits for a dead one."""

from __future__ import annotations

import mmap
import os
import struct
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pdbus.errors import Conflict, InvalidRequest
from pdbus.model.batch import Batch, SequenceSlice
from pdbus.model.checkpoint import open_checkpoint
from pdbus.model.native_build import build_native
from pdbus.model.native_pool import NativePool
from pdbus.native.build import levels
from pdbus.native.cores import Cell, ledger, write_ledger
from pdbus.native.library import NativeEngine
from tests.support.checkpoints import tiny_checkpoint

Array = np.ndarray[Any, Any]
native = pytest.mark.skipif(not levels(), reason="no kernels for this processor")
TOKENS = [int(token) for token in np.random.default_rng(1).integers(3, 320, 200)]


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """A ledger of two cores."""
    return _ledger(tmp_path / "cores", 2)


def _ledger(path: Path, cores: int) -> Path:
    with path.open("w+b") as file:
        write_ledger(file.fileno(), cores)
    return path


class Other:
    """Another engine, as far as the ledger shows it: its cell, and the stamp in it."""

    def __init__(self, path: Path) -> None:
        self.cell = Cell(path)
        with path.open("r+b") as file:
            self._memory = mmap.mmap(file.fileno(), 0)

    def close(self) -> None:
        self.cell.close()
        self._memory.close()

    def says(self, computing: bool, ago_s: float = -5.0) -> None:
        """By default so that it holds for the whole test, however slow the machine is."""
        stamp = time.monotonic_ns() - int(ago_s * 1e9)
        struct.pack_into("=q", self._memory, 64 * (1 + self.cell.number), (stamp & ~1) | computing)

    def stamp(self, number: int) -> int:
        (found,) = struct.unpack_from("=q", self._memory, 64 * (1 + number))
        return int(found)


class Runner:
    """A tiny model on an engine that shares the ledger's cores."""

    def __init__(self, engine: NativeEngine, checkpoint: Path) -> None:
        opened = open_checkpoint(str(checkpoint))
        self.model = build_native(opened.config, {}, dict(opened.tensors()), engine, "int8-groups")
        self.pool = NativePool(self.model.page_format("fp16"), 13)

    def step(self, on_layer: Callable[[int], None] | None = None) -> Array:
        batch = Batch(TOKENS, [SequenceSlice(0, len(TOKENS), 0, range(13))], range(len(TOKENS)))
        return self.model.forward(batch, self.pool, on_layer)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_checkpoint(tmp_path_factory.mktemp("model"), "llama")


@pytest.fixture
def runner(path: Path, library_folder: Path, checkpoint: Path) -> Iterator[tuple[Runner, int]]:
    """And the id of the engine's one helping thread."""
    before = _threads()
    with NativeEngine(1, None, library_folder, path) as engine:
        (helper,) = _threads() - before
        yield Runner(engine, checkpoint), helper


def _threads() -> set[int]:
    return {int(name) for name in os.listdir("/proc/self/task")}


def _awakenings(thread: int) -> int:
    """How often the thread went off a processor: it stands still for one that sleeps."""
    lines = Path(f"/proc/self/task/{thread}/status").read_text().splitlines()
    return sum(int(line.split()[1]) for line in lines if "ctxt_switches" in line)


def _asleep(thread: int) -> None:
    """Waits until it is: on a busy machine a new one may take a while to come that far."""
    give_up_s = time.monotonic() + 60
    while Path(f"/proc/self/task/{thread}/stat").read_text().rpartition(")")[2].split()[0] != "S":
        assert time.monotonic() < give_up_s
        time.sleep(0.001)


def _helped(runner: Runner, helper: int, steps: int, says: Callable[[], None] = lambda: None) -> bool:
    """Whether the helper woke for one of the steps; `says` is called before each."""
    says()
    runner.step()
    _asleep(helper)
    before = _awakenings(helper)
    for _ in range(steps):
        says()
        runner.step()
        if _awakenings(helper) > before:
            return True
    return False


@native
def test_an_engine_alone_has_every_core(runner: tuple[Runner, int]) -> None:
    assert _helped(*runner, steps=500)


@native
@pytest.mark.parametrize("computing", [True, False], ids=["in a step", "between two steps"])
def test_beside_another_one_it_has_its_share_and_the_helper_sleeps(
    runner: tuple[Runner, int], path: Path, computing: bool
) -> None:
    with closing(Other(path)) as other:
        assert not _helped(*runner, steps=30, says=lambda: other.says(computing))


@native
@pytest.mark.parametrize(("computing", "ago_s"), [(True, 0.5), (False, 0.1)], ids=["died in a step", "idle"])
def test_what_computes_no_longer_does_not_count(
    runner: tuple[Runner, int], path: Path, computing: bool, ago_s: float
) -> None:
    with closing(Other(path)) as other:
        assert _helped(*runner, steps=500, says=lambda: other.says(computing, ago_s))


@native
def test_it_takes_the_other_core_as_soon_as_it_is_free(runner: tuple[Runner, int], path: Path) -> None:
    with closing(Other(path)) as other:
        assert not _helped(*runner, steps=5, says=lambda: other.says(True))
        assert _helped(*runner, steps=500, says=lambda: other.says(False, ago_s=1.0))


@native
def test_shares_that_change_from_layer_to_layer_change_no_bit(runner: tuple[Runner, int], path: Path) -> None:
    with closing(Other(path)) as other:
        alone = runner[0].step()
        for computing in ([True, False], [False, True]):
            found = runner[0].step(
                lambda layer, says=computing: other.says(says[layer], ago_s=-5.0 if says[layer] else 1.0)
            )
            assert np.array_equal(found, alone)


@native
def test_it_says_so_while_it_computes_and_when_it_stops(runner: tuple[Runner, int], path: Path) -> None:
    with closing(Other(path)) as other:
        in_step: list[int] = []
        runner[0].step(lambda layer: in_step.append(other.stamp(0)))
        after = other.stamp(0)
    assert [stamp & 1 for stamp in (*in_step, after)] == [1, 1, 0]
    assert all(abs(time.monotonic_ns() - stamp) < 10e9 for stamp in (*in_step, after))


@native
@pytest.mark.parametrize("first", [True, False])
def test_what_does_not_divide_evenly_goes_to_the_first(
    tmp_path: Path, library_folder: Path, checkpoint: Path, first: bool
) -> None:
    """Two engines, three cores: two threads for the one, one for the other."""
    path = _ledger(tmp_path / "cores", 3)
    with ExitStack() as stack:
        earlier = None if first else stack.enter_context(closing(Other(path)))
        before = _threads()
        runner = Runner(stack.enter_context(NativeEngine(1, None, library_folder, path)), checkpoint)
        helpers = sorted(_threads() - before)
        other = earlier or stack.enter_context(closing(Other(path)))
        for _ in range(2000 if first else 30):
            other.says(True)
            runner.step()
            awakenings = sorted(_awakenings(helper) for helper in helpers)
            if awakenings[-1] > 20:
                break
        assert len(awakenings) == 2
        assert awakenings[0] <= 4  # it started, and was told once that it is not needed
        assert (awakenings[1] > 20) == first


def test_each_engine_has_a_cell_of_its_own_and_a_left_one_is_taken_up_again(path: Path) -> None:
    with closing(Cell(path)) as first:
        with closing(Cell(path)) as second:
            assert (first.number, second.number) == (0, 1)
            assert first.cores == 2
        with closing(Cell(path)) as again:
            assert again.number == 1


def test_a_killed_process_gives_its_cell_back(path: Path) -> None:
    program = "import sys, pathlib, pdbus.native.cores as c; c.Cell(pathlib.Path(sys.argv[1])); print('has'); input()"
    with subprocess.Popen(
        [sys.executable, "-u", "-c", program, str(path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as holder:
        assert holder.stdout
        assert holder.stdout.readline() == b"has\n"
        with closing(Cell(path)) as second:
            assert second.number == 1
        holder.kill()
        holder.wait()
        with closing(Cell(path)) as first:
            assert first.number == 0


def test_a_full_ledger_refuses_one_more_by_its_name(path: Path) -> None:
    with ExitStack() as stack:
        for _ in range(63):
            stack.enter_context(closing(Cell(path)))
        with pytest.raises(Conflict, match="63 cells"):
            Cell(path)


@pytest.mark.parametrize(
    "content", [b"", b"something else" * 1000, b"pdcores1" + bytes(4088)], ids=["empty", "other", "no cores"]
)
def test_a_file_that_is_no_ledger_is_refused(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "file").write_bytes(content)
    with pytest.raises(InvalidRequest, match="no ledger"):
        Cell(tmp_path / "file")


def test_a_file_that_is_not_there_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InvalidRequest, match="can't be opened"):
        Cell(tmp_path / "none")


def test_one_in_memory_is_opened_by_what_a_child_inherits() -> None:
    with ledger(5) as fd:
        assert fd is not None
        program = "import sys, pathlib, pdbus.native.cores as c; print(c.Cell(pathlib.Path(sys.argv[1])).cores)"
        command = [sys.executable, "-c", program, f"/proc/self/fd/{fd}"]
        assert subprocess.run(command, pass_fds=(fd,), capture_output=True, check=True).stdout == b"5\n"
