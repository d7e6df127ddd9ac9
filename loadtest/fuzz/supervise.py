"""Runs one kind in a process of its own, watches its progress and its memory, and goes on behind what killed it."""

from __future__ import annotations

import contextlib
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path

from loadtest.fuzz.board import Board, shared_board
from loadtest.fuzz.drive import LIMIT_S
from loadtest.memory import resident_bytes

START_S = 120.0
"""For the services of a kind to come up, on a busy machine."""
STUCK_S = 2 * LIMIT_S
END_S = 60.0
"""For what is under way at the end to be let go."""
_LOOK_S = 0.1
_DUMP_S = 1.0
_LIVES = 20
_WARM = 0.2
"""Of a life's inputs: what memory was before counts as warming up."""
SHARES = (0.1, 0.5, 1.0)
"""Of a life's inputs, at which its memory is told."""


@dataclass
class Result:
    kind: str
    inputs: int = 0
    refused: int = 0
    accepted: int = 0
    crashes: int = 0
    hangs: int = 0
    slowest_ms: float = 0.0
    slowest_at: int = 0
    seconds: float = 0.0
    grown_bytes: int = 0
    """The most that any life's memory grew by after it was warm."""
    peak_bytes: int = 0
    resident: dict[float, int] = field(default_factory=dict)
    """Bytes at each of SHARES, in the last life."""
    told: list[str] = field(default_factory=list)

    @property
    def sound(self) -> bool:
        return not self.crashes and not self.hangs


def fuzz(kind: str, inputs: int, seed: int = 0, first: int = 0) -> Result:
    """All inputs, over as many lives of the process as it takes; gives up where one dies before its first input."""
    result, begun = Result(kind), time.monotonic()
    for _ in range(_LIVES):
        before = result.inputs
        with tempfile.TemporaryDirectory(prefix="pdbus-fuzz-", ignore_cleanup_errors=True) as folder:
            _life(result, seed, first + before, inputs - before, Path(folder))
        if result.inputs >= inputs or result.inputs == before:
            break
    result.seconds = time.monotonic() - begun
    return result


def _life(result: Result, seed: int, first: int, count: int, folder: Path) -> None:
    output = folder / "told"
    arguments = ["-m", "loadtest.fuzz.child", result.kind, str(seed), str(first), str(count), str(folder)]
    with shared_board(folder / "board") as board, output.open("wb") as sink:
        process = subprocess.Popen(
            [sys.executable, *arguments], stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, stderr=sink
        )
        try:
            stuck = _watch(process, board, count, result)
        finally:
            process.kill()
            code = process.wait()
        done = board["inputs"]
        _add(result, board)
    result.told += [line for line in [output.read_text(errors="replace").strip()] if line]
    if stuck:
        result.hangs += 1
        result.told.append(f"input {first + done}: the process no longer got on")
    elif code:
        result.crashes += 1
        result.told.append(f"input {first + done}: the process ended with {code}")
    if (stuck or code) and 0 < done < count:
        result.inputs += 1


def _watch(process: subprocess.Popen[bytes], board: Board, count: int, result: Result) -> bool:
    """Until the process ends, or gets on no more, which is True."""
    result.resident = {}
    warm, done, moved_s = 0, 0, time.monotonic() + START_S
    while process.poll() is None:
        time.sleep(_LOOK_S)
        now, resident = board["inputs"], resident_bytes(process.pid)
        result.peak_bytes = max(result.peak_bytes, resident)
        if resident:
            result.resident = {share: resident for share in SHARES if now >= share * count} | result.resident
        if now >= _WARM * count and resident:
            warm = warm or resident
            result.grown_bytes = max(result.grown_bytes, resident - warm)
        if now != done:
            done, moved_s = now, time.monotonic()
        elif time.monotonic() - moved_s > STUCK_S + (END_S if now == count else 0.0):
            process.send_signal(signal.SIGUSR1)
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(_DUMP_S)
            return True
    return False


def _add(result: Result, board: Board) -> None:
    for name in ("inputs", "refused", "accepted", "crashes", "hangs"):
        setattr(result, name, getattr(result, name) + board[name])
    if board["slowest_us"] / 1e3 > result.slowest_ms:
        result.slowest_ms, result.slowest_at = board["slowest_us"] / 1e3, board["slowest_at"]
