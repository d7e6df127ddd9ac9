"""Memory that a process has given back within itself costs it nothing to take again."""

from __future__ import annotations

import subprocess
import sys

import pytest

_FRAMES = """
import resource
from pdbus.runtime.memory import keep_freed_memory

keep_freed_memory()

def frames():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(4):
        held = [bytearray(512 << 10) for _ in range(16)]
        del held
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

frames()
print(frames())
"""


@pytest.mark.skipif(sys.platform != "linux", reason="glibc's heap")
def test_frames_of_a_second_transfer_find_the_memory_of_the_first() -> None:
    said = subprocess.run([sys.executable, "-c", _FRAMES], capture_output=True, text=True, check=True).stdout
    assert int(said) < 1000  # of 8192 pages in all
