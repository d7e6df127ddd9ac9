"""A short run of the consistency check on real processes; `python -m loadtest consistency` is the long one."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from loadtest.checker.records import GUARANTEES
from loadtest.checker.run import Wanted, consistency
from loadtest.consistency.command import render


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_no_answer_mixes_versions_whatever_breaks(tmp_path: Path) -> None:
    found = asyncio.run(consistency(Wanted(300, 0.5, rate=10.0, seed=1, fault_every_s=4.0, keep=tmp_path)))
    assert found.sound, render(found)
    assert found.judgement.roots > 1
    assert found.messages.total() > 0
    assert all(found.verdict.events[guarantee] for guarantee in GUARANTEES)
