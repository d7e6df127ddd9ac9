"""The pure parts of quality and invariance: what counts as worse, and what as different."""

from __future__ import annotations

import numpy as np
import pytest

from loadtest.invariance.engine import Answer
from loadtest.invariance.summary import compare
from loadtest.invariance.summary import render as render_ways
from loadtest.quality.measure import Reading
from loadtest.quality.summary import Quality, quality, render, verdict
from pdbus.kv.format import KvDtype


def reading(losses: list[float], best: list[int], kv_dtype: KvDtype = "int8") -> Reading:
    return Reading("int8", kv_dtype, np.array(losses), np.array(best))


def test_quality_is_a_ratio_of_perplexities_on_the_same_tokens() -> None:
    exact, other = reading([1.0, 2.0, 3.0], [5, 6, 7]), reading([1.1, 2.2, 3.0], [5, 6, 8])
    found = quality(other, exact)
    assert found.perplexity == pytest.approx(np.exp(2.1))
    assert found.change == pytest.approx(np.exp(0.1) - 1)
    assert found.error == pytest.approx(np.std([0.1, 0.2, 0.0]) / np.sqrt(3))
    assert found.same == pytest.approx(2 / 3)
    assert quality(exact, exact).change == 0


@pytest.mark.parametrize(("change", "keeps"), [(0.0099, True), (0.0101, False)])
def test_the_default_precision_may_cost_one_percent(change: float, keeps: bool) -> None:
    fine = Quality("fp32", "fp32", 20.0, 0.0, 0.0, 1.0)
    default = Quality("int8", "int8", 20.2, change, 0.001, 0.95)
    said, found = verdict([fine, default])
    assert found is keeps
    assert ("NOT" in said) is not keeps
    assert "int8 (default)" in render([fine, default])
    assert verdict([fine])[1]


def test_one_other_bit_in_one_row_is_told() -> None:
    reference = [Answer([1, 2], [b"a", b"b"]), Answer([3], [b"c"])]
    same = compare("again", reference, reference, True)
    assert same.equal
    assert (same.rows, same.differing) == (3, 0)
    other = compare("otherwise", [Answer([1, 2], [b"a", b"x"]), Answer([3], [b"c"], 32)], reference, True)
    assert not other.equal
    assert (other.differing, other.differing_answers, other.cached_tokens) == (1, 0, 32)
    assert compare("shorter", [Answer([1], [b"a"]), Answer([3], [b"c"])], reference, True).differing == 1


def test_a_way_that_was_not_taken_proves_nothing() -> None:
    reference = [Answer([1], [b"a"])]
    skipped = compare("from a cache", reference, reference, False)
    assert not skipped.equal
    assert "DID NOT HAPPEN" in render_ways([skipped])
    assert not compare("nothing", [], [], True).equal
