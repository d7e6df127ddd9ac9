"""A short run of the chaos test on real processes; `python -m loadtest chaos` is the long one."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from loadtest.chaos.command import judged_of, render, sound
from loadtest.chaos.run import Wanted, chaos


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_nothing_is_lost_wrong_or_leaked_whatever_is_struck(tmp_path: Path) -> None:
    found = asyncio.run(chaos(Wanted(minutes=0.7, every_s=5.0, callers=6, seed=1, keep=tmp_path)))
    judged = judged_of(found)
    assert sound(found, judged), render(found, judged, 1)
    assert found.strikes
