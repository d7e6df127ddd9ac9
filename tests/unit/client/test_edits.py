"""Which blocks an edit of rows makes anew, and of which of them the old content has to be known."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from pdbus.client.weights.edits import NewBlock, covered, edited, replaced, row_edits
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
    whole, others = covered(TENSOR, ids, new)
    rest = row_edits(TENSOR, ids[others], new[others])
    got = [*whole, *_made(rest)]
    assert {one.index: (one.digest, bytes(one.content)) for one in got} == {
        one.index: (one.digest, bytes(one.content)) for one in _made(row_edits(TENSOR, ids, new))
    }
    assert all({*range(4 * index, min(4 * index + 4, ROWS))} - {*rows} for index in rest)


def _made(edits: dict[int, object]) -> list[NewBlock]:
    found = [edited(TENSOR, index, CONTENTS[index], edit) for index, edit in edits.items()]  # type: ignore[arg-type]
    return [one for one in found if one]
