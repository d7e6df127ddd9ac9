"""Which blocks an edit of rows makes anew, and of which of them the old content has to be known."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from pdbus.client.weights.edits import edited, replaced, row_edits
from pdbus.weights.blocks import cut

WIDTH = 16_384
"""Four rows of a block."""
ROWS = 10
OLD = np.zeros((ROWS, WIDTH), np.float32)
TENSOR, CONTENTS = replaced("w", "fp32", OLD, None)[0], list(cut(OLD))


@given(rows=st.lists(st.integers(0, ROWS - 1), unique=True), values=st.data())
def test_rows_make_the_same_blocks_whether_or_not_the_old_ones_are_looked_at(
    rows: list[int], values: st.DataObject
) -> None:
    drawn = values.draw(st.lists(st.integers(0, 2), min_size=len(rows), max_size=len(rows)))  # 0: as before
    ids, new = np.array(rows, np.int64), np.repeat(np.array(drawn, np.float32), WIDTH).reshape(-1, WIDTH)
    whole, edits = row_edits(TENSOR, ids, new)
    others = [edited(TENSOR, index, CONTENTS[index], edit) for index, edit in edits.items()]
    changed = OLD.copy()
    changed[ids] = new
    _, wanted = replaced("w", "fp32", changed, TENSOR)
    got = [*whole, *(one for one in others if one)]
    assert {one.index: (one.digest, bytes(one.content)) for one in got} == {
        one.index: (one.digest, bytes(one.content)) for one in wanted
    }
    assert all({*range(4 * index, min(4 * index + 4, ROWS))} - {*rows} for index in edits)
