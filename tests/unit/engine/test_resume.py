"""What is there of a prompt below some layer is copied and not computed again; what is not known is computed whole."""

from __future__ import annotations

from dataclasses import replace

import pytest

from pdbus.engine.chunks import Turn
from pdbus.engine.preemption import Preemption
from pdbus.engine.scheduler import Limits, Scheduler
from pdbus.engine.sequence import Lower, Sequence
from pdbus.engine.tenants import Tenants
from pdbus.kv.pages import PageTable
from pdbus.kv.prefix import page_keys
from tests.support.sequences import SCOPE, sequence
from tests.unit.engine.test_preemption import Shelf

PAGE = 4
LAYERS = (1, 3)
PROMPT = list(range(26))  # six full pages and two tokens
Copied = list[tuple[int, tuple[int, ...], tuple[int, ...]]]


def scheduler(pages: int = 40, chunk: int = 16) -> tuple[Scheduler, Copied]:
    copied: Copied = []

    def copy(layer: int, sources: object, targets: object) -> None:
        copied.append((layer, tuple(sources), tuple(targets)))  # type: ignore[arg-type]

    return Scheduler(PageTable(pages), Limits(PAGE, chunk, 8), None, copy), copied


def prompt(plan: Scheduler, version: str, prompt: list[int] = PROMPT, **fields: object) -> Sequence:
    """Of a version that is named by what its layers 0, 1 and 2, and those above are."""
    made = sequence(plan.pages, prompt, root=version.encode(), **fields)  # type: ignore[arg-type]
    made.keys = page_keys(prompt, scope := replace(SCOPE, kv_root=version.encode()))
    below = [(layer, replace(scope, kv_root=version[:part].encode())) for part, layer in enumerate(LAYERS, 1)]
    made.lower = tuple(Lower(layer, scope, page_keys(prompt, scope)) for layer, scope in below)
    return made


def step(plan: Scheduler) -> Turn:
    turn = plan.turn(0.0)
    for group in turn.groups:
        for chunk in group:
            last = chunk.last
            plan.computed(chunk)
            if last:
                chunk.sequence.append(7)
    plan.took(turn, 0.001)
    return turn


def compute(plan: Scheduler, one: Sequence) -> list[tuple[int, int]]:
    """(first layer, tokens) of its chunks; its pages are given back."""
    plan.add(one)
    chunks = []
    while not one.output_index:
        chunks += [(c.first_layer, c.tokens) for group in step(plan).groups for c in group if c.sequence is one]
    plan.remove(one)
    one.hold.release()
    return chunks


@pytest.mark.parametrize(("version", "layer"), [("aab", 3), ("abb", 1)])
def test_an_update_of_upper_layers_leaves_the_lower_ones(version: str, layer: int) -> None:
    plan, copied = scheduler()
    old = prompt(plan, "aaa")
    plan.add(old)
    while not old.output_index:
        step(plan)
    new = prompt(plan, version)
    assert compute(plan, new) == [(layer, 16), (layer, 8), (0, 2)]
    ((where, sources, targets),) = copied
    assert (where, sources, new.resumed) == (layer, old.hold.pages[:6], 24)
    assert not set(targets) & set(old.hold.pages)
    assert compute(plan, prompt(plan, version)) == [(0, 2)]
    assert len(copied) == 1


def test_what_has_another_beginning_or_lowest_layer_is_computed_whole() -> None:
    plan, copied = scheduler()
    compute(plan, prompt(plan, "aaa"))
    assert compute(plan, prompt(plan, "baa")) == [(0, 16), (0, 10)]
    assert compute(plan, prompt(plan, "aab", [99, *PROMPT[1:]])) == [(0, 16), (0, 10)]
    assert copied == []
    assert compute(plan, prompt(plan, "aab", [*PROMPT[:9], 99, *PROMPT[10:]])) == [(3, 8), (0, 16), (0, 2)]


def test_where_there_is_no_room_for_both_it_is_computed_whole() -> None:
    plan, copied = scheduler(pages=8)
    compute(plan, prompt(plan, "aaa"))
    assert compute(plan, prompt(plan, "aab")) == [(0, 16), (0, 10)]
    assert copied == []
    plan.pages.check([])


def test_pages_that_came_from_elsewhere_are_no_beginning() -> None:
    """What entered their layers is not in them."""
    plan, copied = scheduler()
    one = prompt(plan, "aaa", ready=False)
    plan.add(one)
    step(plan)
    one.filled(8)
    plan.publishing.publish(one)
    while not one.output_index:
        step(plan)
    assert compute(plan, prompt(plan, "aab")) == [(0, 16), (0, 10)]
    assert copied == []


def test_one_that_is_preempted_meanwhile_is_computed_whole_from_there() -> None:
    plan, _ = scheduler(chunk=8)
    compute(plan, prompt(plan, "aaa"))
    other, new = sequence(plan.pages, [7] * 5), prompt(plan, "aab")
    plan.add(new)
    step(plan)
    assert (new.computed, new.resumed) == (8, 24)
    plan.add(other)
    step(plan)
    assert Preemption(plan.pages, PAGE, Shelf(), Tenants(8)).preempt([new]) is new
    assert (new.computed < 24, new.resumed) == (True, 0)


def test_a_pass_begins_with_one_layer() -> None:
    plan, _ = scheduler()
    compute(plan, prompt(plan, "aaa"))
    for one in (prompt(plan, "aab"), prompt(plan, "abb"), sequence(plan.pages, [7] * 5, root=b"aab")):
        plan.add(one)
    groups = step(plan).groups
    assert sorted({chunk.first_layer for chunk in group}.pop() for group in groups) == [0, 1, 3]
    assert all(len({chunk.first_layer for chunk in group}) == 1 for group in groups)
