"""The process that takes the inputs: `python -m loadtest.fuzz.child KIND SEED FIRST COUNT FOLDER`."""

from __future__ import annotations

import asyncio
import faulthandler
import logging
import os
import resource
import signal
import sys
import threading
import warnings
from pathlib import Path

import uvloop

from loadtest.fuzz.board import Board, shared_board
from loadtest.fuzz.drive import drive, once_each
from loadtest.fuzz.kinds import KINDS

MOST_BYTES = 8 << 30
"""Beyond this an allocation fails, so that an input which makes one is found out and the machine lives on."""


async def _run(kind: str, seed: int, first: int, count: int, folder: Path, board: Board) -> None:
    async with KINDS[kind].open(folder) as fuzzer:
        await drive(fuzzer, seed, first, count, board, once_each(lambda line: print(line, file=sys.stderr, flush=True)))


def _end_with_parent() -> None:
    """Nobody writes there: the pipe breaks when the parent is gone, however it went."""
    os.read(0, 1)
    os._exit(1)


def main(kind: str, seed: str, first: str, count: str, folder: str) -> None:
    threading.Thread(target=_end_with_parent, daemon=True).start()
    faulthandler.enable()
    faulthandler.register(signal.SIGUSR1)  # where it hangs
    resource.setrlimit(resource.RLIMIT_DATA, (MOST_BYTES, MOST_BYTES))
    logging.getLogger().setLevel(logging.ERROR)
    warnings.simplefilter("ignore")  # of the code that jinja2 makes of a template
    with shared_board(Path(folder) / "board") as board, asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(_run(kind, int(seed), int(first), int(count), Path(folder), board))


if __name__ == "__main__":
    main(*sys.argv[1:])
