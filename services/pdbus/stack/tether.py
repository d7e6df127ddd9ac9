"""Ties a foreign program to its parent: `python -m pdbus.stack.tether LIFELINE_FD PROGRAM ARGUMENT…`.

The embedded NATS server knows nothing of lifelines, and must not outlive a launcher that was killed. On Linux the
kernel itself sends the signal (PR_SET_PDEATHSIG, which survives exec), so this process becomes the program; elsewhere
it stays as a small parent that watches the lifeline, a pipe whose other end the launcher holds.
"""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys

_PR_SET_PDEATHSIG = 1
_STOP_S = 10.0
_WATCH_S = 0.5


def main(arguments: list[str]) -> int:
    fd, program = int(arguments[0]), arguments[1:]
    if sys.platform == "linux":
        die_with_parent()
        if broken(fd, wait_s=0):  # the launcher died before the kernel was told
            return 0
        os.execv(program[0], program)  # noqa: S606 - no shell is wanted
    return watch(fd, program)


def die_with_parent() -> None:
    """Linux: SIGTERM to this process, and to what it becomes by exec, when the thread that started it ends."""
    import ctypes

    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG) failed")


def broken(fd: int, wait_s: float) -> bool:
    """Whether the other end of the pipe is closed; waits up to `wait_s` for that. Nothing is ever written to it."""
    return bool(select.select([fd], [], [], wait_s)[0])


def watch(fd: int, program: list[str]) -> int:
    """Runs `program` until it ends or the lifeline breaks; SIGTERM and SIGINT are passed on. Returns its exit code."""
    child = subprocess.Popen(program)
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda number, _: child.send_signal(number))
    while child.poll() is None:
        if broken(fd, _WATCH_S):
            child.terminate()
            try:
                child.wait(_STOP_S)
            except subprocess.TimeoutExpired:
                child.kill()
    return child.wait()


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
