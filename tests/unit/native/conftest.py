"""Native engines for tests: one library per instruction set, where those of this machine lie: to compile them takes ten
seconds each, and they are named by all that they are made from."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from pdbus.native.build import Level, cache_folder, levels
from pdbus.native.library import NativeEngine

pytestmark = pytest.mark.skipif(not levels(), reason="no kernels for this processor")


@pytest.fixture(scope="session")
def library_folder() -> Path:
    return cache_folder()


@pytest.fixture(scope="session", params=levels())
def engine(request: pytest.FixtureRequest, library_folder: Path) -> Iterator[NativeEngine]:
    """Two threads, on each instruction set of this machine in turn."""
    level: Level = request.param
    with NativeEngine(2, level, library_folder) as made:
        yield made
