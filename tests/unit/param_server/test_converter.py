"""What a param-server converts is what is due when it comes to it; and which blocks of an older version it takes."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pdbus.messages.changelog import Commit, Convert, LogEntry, Ref
from pdbus.model.convert import Made
from pdbus.model.parts import EMBEDDING, HEAD
from pdbus.param_server.convert import known_blocks, runs_of
from pdbus.param_server.converter import Converter
from pdbus.weights.blocks import block_count, rows_per_block
from pdbus.weights.conversions import Due
from pdbus.weights.history import History
from pdbus.weights.layer import Tensor
from pdbus.weights.manifest import Manifest

A, B = b"A" * 32, b"B" * 32


async def test_what_is_due_no_more_after_others_were_made_is_not_made(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else a line would be led back to a version that was rolled back meanwhile."""
    history = History()
    entries = [LogEntry(commit=Commit("1", A, None, "me", "", ()))]
    entries += [LogEntry(convert=Convert(one, f"stable-{one}", "me", line="stable")) for one in ("fp16", "int8")]
    for seq, entry in enumerate(entries, 1):
        history.apply(seq, seq, entry)
    place: Any = SimpleNamespace(
        follower=SimpleNamespace(history=history),
        fleet=SimpleNamespace(live=lambda service: ()),
        server="me",
        model="m",
    )
    converter, done = Converter(place, SimpleNamespace()), list[Due]()  # type: ignore[arg-type]

    async def do(due: Due) -> None:
        done.append(due)
        history.apply(history.seq + 1, 10, LogEntry(ref=Ref("stable-int8", None, "me")))

    monkeypatch.setattr(converter, "_do", do)
    await converter._act()
    assert [due.precision for due in done] == ["fp16"]


SHAPE = (5000, 64)


def tensor(dtype: str, changed: frozenset[int] = frozenset(), name: str = "a.weight") -> Tensor:
    """Whose blocks are named by what is in them."""
    count = block_count(SHAPE, dtype)
    return Tensor(name, dtype, SHAPE, tuple(f"{dtype}{i}{i in changed}".encode().ljust(32) for i in range(count)))


@settings(max_examples=30)
@given(st.sets(st.integers(0, block_count(SHAPE, "fp32") - 1)), st.sampled_from(["int8", "fp16", "fp8"]))
def test_blocks_stay_in_which_no_row_changed(changed: set[int], dtype: str) -> None:
    before, older, now = tensor("fp32"), tensor(dtype), tensor("fp32", frozenset(changed))
    found = known_blocks(Made("a.weight", now, dtype), Manifest.build([before]), Manifest.build([older]))
    rows = np.zeros(SHAPE[0], bool)
    for index in changed:
        step = rows_per_block(SHAPE, "fp32")
        rows[index * step : (index + 1) * step] = True
    step = rows_per_block(SHAPE, dtype)
    touched = [bool(rows[start : start + step].any()) for start in range(0, SHAPE[0], step)]
    assert found == [None if anew else block for anew, block in zip(touched, older.blocks, strict=True)]


def test_of_another_shape_or_form_nothing_stays() -> None:
    now, older = Made("a.weight", tensor("fp32"), "int8"), Manifest.build([tensor("int8")])
    none = [None] * block_count(SHAPE, "int8")
    assert known_blocks(now, Manifest(()), Manifest(())) == none
    assert known_blocks(now, Manifest.build([tensor("fp32")]), Manifest.build([tensor("fp8")])) == none
    other = replace(tensor("fp32"), shape=(5000, 32), blocks=tensor("fp32").blocks[: block_count((5000, 32), "fp32")])
    assert known_blocks(now, Manifest.build([other]), older) == none


def test_a_head_that_became_the_embedding_is_made_anew() -> None:
    embedding, head = tensor("fp32", name=EMBEDDING), tensor("fp32", frozenset({0}), name=HEAD)
    older = Manifest.build([tensor("int8", name=EMBEDDING), tensor("int8", frozenset({0}), name=HEAD)])
    tied = Made(HEAD, embedding, "int8")
    assert known_blocks(tied, Manifest.build([embedding, head]), older) == [None] * len(older.tensors[HEAD].blocks)
    assert known_blocks(tied, Manifest.build([embedding]), older) == list(older.tensors[HEAD].blocks)


@settings(max_examples=30)
@given(st.sets(st.integers(0, 60)), st.integers(1, 8))
def test_runs_hold_all_in_order_and_each_is_one(numbers: set[int], most: int) -> None:
    runs = list(runs_of(sorted(numbers), most))
    assert [number for run in runs for number in run] == sorted(numbers)
    assert all(0 < len(run) <= most for run in runs)
