"""The lifeline: a process never outlives the launcher that holds the other end, whatever it is doing."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time

import pytest

from pdbus.runtime.lifeline import lifeline

# A process whose main thread is deaf: only the lifeline's own thread can end it.
DEAF = """
import sys, threading
from pdbus.runtime.lifeline import lifeline
with lifeline(int(sys.argv[1]), lambda: print("lost", flush=True), grace_s=0.2):
    print("up", flush=True)
    threading.Event().wait()
"""


def test_the_loss_is_told_and_a_deaf_process_is_ended() -> None:
    read, write = os.pipe()
    process = subprocess.Popen(
        [sys.executable, "-c", DEAF, str(read)], pass_fds=(read,), stdout=subprocess.PIPE, text=True
    )
    os.close(read)
    with process:
        assert process.stdout is not None
        assert process.stdout.readline() == "up\n"
        os.close(write)
        assert process.stdout.readline() == "lost\n"
        assert process.wait(60) == 1


def test_an_unbroken_lifeline_is_left_without_a_trace() -> None:
    read, write = os.pipe()
    before = threading.active_count()
    start = time.monotonic()
    with lifeline(read, lambda: pytest.fail("nothing was lost")):
        assert threading.active_count() == before + 1
    assert threading.active_count() == before
    assert time.monotonic() - start < 30
    os.close(read)
    os.close(write)


def test_without_a_launcher_nobody_is_watched() -> None:
    before = threading.active_count()
    with lifeline(None, lambda: pytest.fail("nothing was lost")):
        assert threading.active_count() == before
