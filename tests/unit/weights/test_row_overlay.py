from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdbus.errors import InvalidRequest, Overloaded
from pdbus.messages.rows import RowsUpdate
from pdbus.weights.blocks import Array
from pdbus.weights.row_overlay import RowOverlay
from pdbus.weights.tables import decoded_update, encoded_ids, encoded_values

ROWS, WIDTH = 8, 2
BATCHES = st.lists(st.tuples(st.integers(0, ROWS - 1), st.integers(-5, 5)), min_size=0, max_size=6)


def update(batch: list[tuple[int, int]]) -> RowsUpdate:
    ids = np.array([row for row, _ in batch], np.int64)
    values = np.array([[value, -value] for _, value in batch], np.float32).reshape(-1, WIDTH)
    return RowsUpdate(encoded_ids(ids), encoded_values(values))


def applied(overlay: RowOverlay, seq: int, batch: list[tuple[int, int]]) -> None:
    overlay.apply(seq, *decoded_update(update(batch), ROWS, WIDTH))


def read(overlay: RowOverlay, base: Array) -> list[int]:
    ids, values = np.arange(ROWS), np.full((ROWS, WIDTH), np.nan, np.float32)
    lacking = overlay.read(ids, values)
    values[lacking] = base[lacking]
    return [int(value) for value in values[:, 0]]


def newest(log: list[tuple[int, list[tuple[int, int]]]], up_to: int) -> list[int]:
    rows = [0] * ROWS
    for seq, batch in log:
        for row, value in batch if seq <= up_to else []:
            rows[row] = value
    return rows


@given(st.lists(BATCHES, max_size=12), st.data())
def test_it_holds_the_newest_value_of_each_row_before_and_after_a_seal(
    batches: list[list[tuple[int, int]]], data: st.DataObject
) -> None:
    log = list(enumerate(batches, 1))
    overlay = RowOverlay(ROWS, WIDTH, 0, 1 << 20)
    base = np.zeros((ROWS, WIDTH), np.float32)
    for seq, batch in log:
        applied(overlay, seq, batch)
        for again in data.draw(st.lists(st.integers(1, seq), max_size=2)):  # delivered once more
            applied(overlay, again, log[again - 1][1])
        if data.draw(st.booleans()):
            sealed = data.draw(st.integers(overlay.floor, seq))
            base[:, 0] = newest(log, sealed)
            overlay.drop(sealed)
            assert overlay.floor == sealed
        assert overlay.seq == seq
        assert read(overlay, base) == newest(log, seq)
    touched = {row for seq, batch in log if seq > overlay.floor for row, _ in batch}
    assert set(overlay.ids.tolist()) == touched


def test_a_seal_beyond_what_it_knows_takes_it_along() -> None:
    overlay = RowOverlay(ROWS, WIDTH, 0, 1 << 20)
    applied(overlay, 1, [(1, 1)])
    overlay.drop(5)
    assert (overlay.seq, len(overlay)) == (5, 0)
    applied(overlay, 4, [(1, 9)])  # in the blocks already
    assert len(overlay) == 0


def test_it_takes_no_more_rows_than_it_may_and_stays_as_it_was() -> None:
    overlay = RowOverlay(ROWS, WIDTH, 0, 3 * 24)
    applied(overlay, 1, [(0, 1), (1, 1), (2, 1)])
    with pytest.raises(Overloaded, match="seal"):
        applied(overlay, 2, [(2, 2), (3, 2)])
    assert (overlay.seq, read(overlay, np.zeros((ROWS, WIDTH), np.float32))) == (1, [1, 1, 1, 0, 0, 0, 0, 0])
    applied(overlay, 2, [(2, 2)])
    assert overlay.nbytes <= 3 * 24
    overlay.drop(1)
    applied(overlay, 3, [(3, 3), (4, 3)])
    assert overlay.seq == 3


def test_values_keep_their_bits() -> None:
    overlay = RowOverlay(1, 4, 0, 1 << 10)
    values = np.array([[np.nan, -0.0, 1e-45, np.inf]], np.float32)
    overlay.apply(1, *decoded_update(RowsUpdate(encoded_ids(np.array([0])), encoded_values(values)), 1, 4))
    out = np.zeros((1, 4), np.float32)
    overlay.read(np.array([0]), out)
    assert out.tobytes() == values.tobytes()


@pytest.mark.parametrize(
    "garbage",
    [
        RowsUpdate(b"1234567", b""),
        RowsUpdate(encoded_ids(np.array([ROWS])), bytes(4 * WIDTH)),
        RowsUpdate(encoded_ids(np.array([1])), bytes(4 * WIDTH - 4)),
        RowsUpdate(b"\xff" * 8, bytes(4 * WIDTH)),
    ],
)
def test_an_update_that_does_not_fit_is_refused(garbage: RowsUpdate) -> None:
    with pytest.raises(InvalidRequest):
        decoded_update(garbage, ROWS, WIDTH)


@dataclass
class Line:
    """A table's line: versions as (blocks, sealed up to), of which the last is the head; and its log."""

    log: list[tuple[int, list[tuple[int, int]]]] = field(default_factory=list)
    versions: list[tuple[Array, int]] = field(default_factory=lambda: [(np.zeros((ROWS, WIDTH), np.float32), 0)])


@given(st.data())
def test_no_update_is_lost_by_seals_however_they_interleave(data: st.DataObject) -> None:
    """Writers append, sealers read the log and commit with compare-and-set, servers follow both at their own pace."""
    line = Line()
    sealers: list[tuple[int, int]] = []
    """(version that it began on, sequence that it seals)."""
    server, at = RowOverlay(ROWS, WIDTH, 0, 1 << 20), 0
    for _ in range(data.draw(st.integers(1, 25))):
        match data.draw(st.sampled_from(["write", "begin", "commit", "follow", "adopt"])):
            case "write":
                line.log.append((len(line.log) + 1, data.draw(BATCHES)))
            case "begin":
                sealers.append((len(line.versions) - 1, len(line.log)))
            case "commit" if sealers:
                parent, goal = sealers.pop(data.draw(st.integers(0, len(sealers) - 1)))
                if parent == len(line.versions) - 1:  # else another one won
                    blocks, floor = line.versions[parent]
                    folded = RowOverlay(ROWS, WIDTH, floor, 1 << 20)
                    for seq, batch in line.log[floor:goal]:
                        applied(folded, seq, batch)
                    new = np.zeros((ROWS, WIDTH), np.float32)
                    new[:, 0] = read(folded, blocks)
                    line.versions.append((new, max(floor, goal)))
            case "follow" if server.seq < len(line.log):
                applied(server, *line.log[server.seq])
            case "adopt" if at < len(line.versions) - 1:
                at += 1
                server.drop(line.versions[at][1])
        assert read(server, line.versions[at][0]) == newest(line.log, server.seq)
    fresh = RowOverlay(ROWS, WIDTH, line.versions[-1][1], 1 << 20)
    for seq, batch in line.log[fresh.seq :]:
        applied(fresh, seq, batch)
    assert read(fresh, line.versions[-1][0]) == newest(line.log, len(line.log))
