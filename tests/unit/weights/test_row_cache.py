from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from pdbus.weights.row_cache import RowCache

ROWS = 6


def value_at(log: list[dict[int, int]], row: int, seq: int) -> int:
    return next((entry[row] for entry in reversed(log[:seq]) if row in entry), 0)


def read(cache: RowCache, row: int) -> int | None:
    out = np.empty((1, 1), np.float32)
    return None if len(cache.read(np.array([row]), out)) else int(out[0, 0])


@given(st.data())
def test_a_row_is_never_older_than_the_log_that_was_followed(data: st.DataObject) -> None:
    """Reads take their time: rows are reserved, a server answers as of some sequence, the answer comes later; entries
    come meanwhile, rows are given up meanwhile, all is forgotten meanwhile."""
    log: list[dict[int, int]] = []
    room = data.draw(st.integers(1, ROWS))
    cache = RowCache(1, room * 164)
    flying: list[tuple[int, int]] = []
    """(row, sequence as of which a server has answered)."""
    for step in range(data.draw(st.integers(1, 40))):
        row = data.draw(st.integers(0, ROWS - 1))
        match data.draw(st.sampled_from(["write", "follow", "ask", "answer", "clear"])):
            case "write":
                log.append({row: step + 1, data.draw(st.integers(0, ROWS - 1)): step + 1})
            case "follow" if cache.seq < len(log):
                entry = log[cache.seq]
                ids = np.array(list(entry))
                cache.apply(cache.seq + 1, ids, np.array([[entry[row]] for row in entry], np.float32))
            case "ask":
                cache.reserve(np.array([row]))
                flying.append((row, data.draw(st.integers(cache.seq, len(log)))))
            case "answer" if flying:
                asked, seq = flying.pop(data.draw(st.integers(0, len(flying) - 1)))
                cache.fill(seq, np.array([asked]), np.array([[value_at(log, asked, seq)]], np.float32))
            case "clear":
                cache.clear(data.draw(st.integers(cache.seq, len(log))))
        assert len(cache) <= room
        for row in range(ROWS):
            found = read(cache, row)
            newer = {value_at(log, row, seq) for seq in range(cache.seq, len(log) + 1)}
            assert found is None or found in newer


def test_rows_that_are_asked_for_stay_when_others_must_go() -> None:
    cache = RowCache(1, 3 * 164)
    for row in range(3):
        cache.reserve(np.array([row]))
        cache.fill(0, np.array([row]), np.ones((1, 1), np.float32))
    for new in range(3, 7):
        assert read(cache, 2) == 1
        cache.reserve(np.array([new]))
    assert read(cache, 2) == 1


def test_an_update_makes_a_reserved_row_known_without_its_read() -> None:
    cache = RowCache(1, 1 << 12)
    cache.reserve(np.array([1]))
    assert read(cache, 1) is None
    cache.apply(1, np.array([1]), np.full((1, 1), 7, np.float32))
    assert read(cache, 1) == 7
    cache.fill(0, np.array([1]), np.zeros((1, 1), np.float32))
    assert read(cache, 1) == 7
