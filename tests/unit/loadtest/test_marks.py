from __future__ import annotations

import numpy as np
import pytest

from loadtest.weights_rows import marks


def test_a_row_tells_how_old_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    now_s = 100_000.0  # the count of ticks wraps between the two rows
    monkeypatch.setattr("time.monotonic", lambda: now_s)
    rows = np.zeros((2, 16), np.float32)
    marks.mark(rows[0])
    now_s += 150.0
    marks.mark(rows[1])
    now_s += 0.25
    assert marks.ages_ms(rows).tolist() == pytest.approx([150_250.0, 250.0], abs=0.05)
