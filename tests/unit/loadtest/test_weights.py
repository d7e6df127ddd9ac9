"""The pure parts of the measurement of changing weights: figures, goals, changes and traces."""

from __future__ import annotations

import asyncio
from pathlib import Path

import numpy as np
import pytest

from loadtest.client import Observation, _take
from loadtest.goals import at_least, at_most, beside, missed, none_of, table
from loadtest.tiny import tiny_checkpoint
from loadtest.weights.changes import Changes
from loadtest.weights.commits import Told
from loadtest.weights.known import Watch
from loadtest.weights.load import Asked, Run
from loadtest.weights.oracle import evenly
from loadtest.weights.serve import Pairs
from loadtest.weights.zipf import Zipf
from pdbus.messages.presence import Card


def run(*moments_s: float, error: str | None = None) -> Run:
    """One answer whose tokens came then, of a load of 10 s."""
    seen = Observation(0.0, chunks_s=list(moments_s), output_tokens=len(moments_s), end_s=10.0, error=error)
    return Run((Asked((1,), seen),), 10.0)


def test_nothing_measured_reaches_no_goal() -> None:
    nan = float("nan")
    rows = [at_most("a", nan, 1, "s", ""), at_least("b", nan, 0.9, ""), none_of("c", 0, 0, ""), beside("d", "5", "")]
    assert [row.reached for row in rows] == [False, False, False, None]
    assert missed({"x": rows}) == ["x: a", "x: b", "x: c"]
    good = [at_most("a", 1.0, 1, "s", ""), at_least("b", 0.9, 0.9, ""), none_of("c", 0, 5, "")]
    assert all(row.reached for row in good)
    assert "x: a" in table({"x": good})


def test_throughput_is_of_the_steady_part_of_a_load() -> None:
    assert run(1.0, 2.0, 5.0, 9.0, 11.0).tokens_per_s == pytest.approx(3 / 8)
    pairs = Pairs(off=[run(3.0, 4.0), run(3.0, 4.0)], on=[run(3.0), run(3.0, 4.0, error="lost")])
    assert pairs.kept == pytest.approx(0.75)
    assert pairs.failed == ["lost"]
    assert np.isnan(Pairs(off=[run()], on=[run(3.0)]).kept)


def test_waits_are_of_commits_that_became_visible() -> None:
    told = Told(committed=[(b"1", 1_000_000_000), (b"2", 2_000_000_000)], visible={b"2": 2_500_000_000})
    assert told.waits_s == [0.5]


def test_an_answer_of_two_versions_is_an_error() -> None:
    seen = Observation(0.0)
    for fingerprint in ("root-1", "root-1"):
        _take({"system_fingerprint": fingerprint, "choices": [{"text": "a", "token_ids": [1]}]}, seen, 1.0)
    assert (seen.error, seen.ids) == (None, [1, 1])
    _take({"system_fingerprint": "root-2", "choices": []}, seen, 1.0)
    assert "two versions" in (seen.error or "")


async def test_an_entry_is_known_when_the_last_worker_says_so() -> None:
    watch = Watch()
    for seq, (id, known) in enumerate((("p", 4), ("d", 3), ("p", 5), ("d", 7))):
        watch.hear(Card("decode" if id == "d" else "prefill", id, "i", seq, "ready", "m", log_seq=known))
    assert watch.known_ns("p", 6) is None
    assert await watch.all_know(["p", "d"], 5) == watch.known_ns("d", 5) == watch.known_ns("d", 7)


def test_changes_touch_what_they_say(tmp_path: Path) -> None:
    changes = Changes(tiny_checkpoint(tmp_path))
    assert (changes.decoder_layers, changes.nbytes > 0) == (2, True)

    class Update:
        def __init__(self) -> None:
            self.staged: dict[str, np.ndarray] = {}
            self.rows = 0

        async def stage(self, name: str, value: np.ndarray) -> None:
            self.staged[name] = value

        async def stage_rows(self, name: str, rows: np.ndarray, values: np.ndarray) -> None:
            self.rows += len(rows)
            assert len(rows) == len(values)

    async def made(change: object) -> Update:
        update = Update()
        await change(update)  # type: ignore[operator]
        return update

    first, second = (asyncio.run(made(changes.two_layers())) for _ in range(2))
    assert first.staged.keys() == second.staged.keys()
    assert all(name.startswith("model.layers.") for name in first.staged)
    assert all(not np.array_equal(value, second.staged[name]) for name, value in first.staged.items())
    assert asyncio.run(made(changes.one_block())).rows > 0
    assert asyncio.run(made(changes.everything())).staged.keys() > first.staged.keys()


def test_a_zipf_trace_is_the_same_each_time_and_has_favourites() -> None:
    trace = Zipf(users=50, items=500, candidates=4)
    users, items = trace.draw(2000)
    assert items.shape == (2000, 4)
    assert np.array_equal(items, trace.draw(2000)[1])
    counts = np.bincount(users, minlength=50)
    assert counts[0] > counts[10] > counts[49]


def test_a_choice_of_some_keeps_the_ends() -> None:
    assert evenly(range(10), 3) in ([0, 4, 9], [0, 5, 9])
    assert evenly([1, 2], 5) == [1, 2]
    assert evenly([1, 2, 3], 1) == [1]
