"""What a killed launcher leaves behind: nothing. With real processes, killed by their ids."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from pdbus.stack.folder import alive

# A launcher that starts one tethered program, tells its id, and waits to be killed.
LAUNCHER = """
import os, subprocess, sys
read, write = os.pipe()
child = subprocess.Popen(
    [sys.executable, "-m", "pdbus.stack.tether", str(read), sys.executable, "-c", sys.argv[1]],
    pass_fds=(read,), stdout=subprocess.PIPE, start_new_session=True)
print(child.stdout.readline().decode().strip(), flush=True)
sys.stdin.read()
"""
PROGRAM = "import os, signal; print(os.getpid(), flush=True); signal.pause()"
# The same for systems without PR_SET_PDEATHSIG: the tether stays and watches.
WATCHER = """
import os, sys
from pdbus.stack.tether import watch
sys.exit(watch(int(sys.argv[1]), [sys.executable, "-c", sys.argv[2]]))
"""


def _gone(pid: int, within_s: float = 30.0) -> bool:
    give_up = time.monotonic() + within_s
    while alive(pid) and time.monotonic() < give_up:
        time.sleep(0.02)
    return not alive(pid)


@pytest.mark.skipif(sys.platform != "linux", reason="PR_SET_PDEATHSIG is Linux's")
def test_the_program_ends_when_its_launcher_is_killed() -> None:
    launcher = subprocess.Popen(
        [sys.executable, "-c", LAUNCHER, PROGRAM], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    with launcher:
        assert launcher.stdout is not None
        pid = int(launcher.stdout.readline())
        assert alive(pid)
        launcher.send_signal(signal.SIGKILL)
        launcher.wait()
        assert _gone(pid)


@pytest.fixture
def watched():
    """(tether, the end of the lifeline that a launcher would hold, id of the program)."""
    read, write = os.pipe()
    tether = subprocess.Popen(
        [sys.executable, "-c", WATCHER, str(read), PROGRAM], pass_fds=(read,), stdout=subprocess.PIPE
    )
    os.close(read)
    assert tether.stdout is not None
    pid = int(tether.stdout.readline())
    yield tether, write, pid
    tether.kill()
    tether.wait()
    tether.stdout.close()


def test_elsewhere_the_tether_ends_it_when_the_lifeline_breaks(watched) -> None:
    tether, write, pid = watched
    os.close(write)
    tether.wait(60)
    assert _gone(pid)


def test_elsewhere_signals_reach_the_program(watched) -> None:
    tether, write, pid = watched
    tether.terminate()
    assert tether.wait(60) == -signal.SIGTERM % 256 or tether.returncode == -signal.SIGTERM
    assert _gone(pid)
    os.close(write)


def test_nothing_is_left_in_the_source_of_the_launcher_to_outlive_it(tmp_path: Path) -> None:
    """The lifeline's other end is held by the launcher alone: a child must not inherit it."""
    from pdbus.stack.launcher import lifeline_pipe

    with lifeline_pipe() as read:
        subprocess.run([sys.executable, "-c", f"import os; os.fstat({read})"], pass_fds=(read,), check=True)
        inherited = subprocess.run(
            [sys.executable, "-c", "import os; print(*os.listdir('/dev/fd'))"],
            pass_fds=(read,), capture_output=True, text=True, check=True,
        )  # fmt: skip
        fds = {int(fd) for fd in inherited.stdout.split()}
    assert read in fds
    assert read + 1 not in fds
