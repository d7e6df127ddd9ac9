"""Collections are rare within the scope, and as before behind it."""

from __future__ import annotations

import gc
import weakref

from pdbus.runtime.collector import rare_collections


class Knot:
    def __init__(self) -> None:
        self.me = self


def test_rarer_within_and_as_before_afterwards():
    before = gc.get_threshold()
    with rare_collections():
        assert gc.get_threshold()[0] > before[0]
        assert gc.get_freeze_count() > 0
    assert gc.get_threshold() == before
    assert gc.get_freeze_count() == 0


def test_cycles_are_still_collected_in_time():
    with rare_collections():
        knots = [weakref.ref(Knot()) for _ in range(2 * gc.get_threshold()[0])]
        assert knots[0]() is None
