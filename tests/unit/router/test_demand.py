"""What a request will cost is told from its sizes, and from what answers to its tenant came to."""

from __future__ import annotations

from typing import Any

import pytest

from pdbus.context import Deadline, RequestContext
from pdbus.router.demand import Demands
from pdbus.router.openai_schema import parse_builtins
from pdbus.router.throughput import PROMPT_TOKEN


def cost(known: Demands, tenant: str = "a", **fields: Any) -> float:
    request = parse_builtins("completions", {"model": "m", "prompt": [1, 2, 3, 4], "max_tokens": 400} | fields)
    return known.of(request, RequestContext(Deadline.after(1), tenant=tenant)).cost - 4 * PROMPT_TOKEN


def learned(known: Demands, tenant: str, tokens: float, times: int = 100) -> Demands:
    for _ in range(times):
        known.answered(tenant, tokens, whole=True)
    return known


def test_answers_are_taken_to_be_as_long_as_the_tenant_s_were_and_never_longer_than_asked_for() -> None:
    known = learned(learned(Demands(), "short", 5), "long", 300)
    assert cost(known, "short") == pytest.approx(5, rel=0.2)
    assert cost(known, "long") == pytest.approx(300, rel=0.2)
    assert cost(known, "long", max_tokens=20) == 20
    assert cost(known, "short", ignore_eos=True) == 400


def test_of_a_new_tenant_that_of_all_is_believed() -> None:
    known = learned(Demands(), "short", 5)
    assert cost(known, "new") == pytest.approx(5, rel=0.2)
    assert cost(learned(known, "new", 200, times=40), "short") == pytest.approx(5, rel=0.2)


def test_what_was_cut_off_says_nothing() -> None:
    known = Demands()
    known.answered("a", 1, whole=False)
    assert cost(known) == 128


def test_only_so_many_tenants_are_remembered() -> None:
    known = learned(Demands(), "first", 5)
    for number in range(1024):
        known.answered(f"t{number}", 100, whole=True)
    assert cost(known, "first") == pytest.approx(100, rel=0.1)
