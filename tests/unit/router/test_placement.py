"""Which workers take a request: the prompt where its prefix is, within a bound on load, never a dead or foreign one."""

from __future__ import annotations

import dataclasses
import math
import random
from collections import Counter
from collections.abc import Mapping, Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdbus.messages.presence import WHOLE_PROMPTS, Card
from pdbus.router.loads import Loads
from pdbus.router.placement import Pair, Wanted, choose_pair, usable
from pdbus.router.prefixes import PrefixKeys
from pdbus.router.ranking import LOAD_BOUND, rendezvous
from pdbus.router.workers import Booking
from tests.support.cards import PAGE, ROOT, card, cards, wanted


def _choose(
    request: Wanted,
    prefills: Sequence[Card],
    decodes: Sequence[Card],
    loads: Loads | None = None,
    *,
    pages: Mapping[str, int] | None = None,
    seed: int = 1,
) -> Pair:
    """`pages`: how many of the prompt's pages who has."""

    def matching(keys: PrefixKeys, workers: Sequence[Card]) -> Mapping[str, int]:
        return pages or {}

    pair = choose_pair(request, prefills, decodes, loads or Loads(), matching, random.Random(seed))
    assert pair is not None
    return pair


def _bound(workers: Sequence[Card]) -> int:
    return math.ceil(LOAD_BOUND * sum(one.load.running for one in workers) / len(workers))


@st.composite
def _fleets(draw: st.DrawFn) -> tuple[list[Card], list[Card], dict[str, int], Wanted]:
    """Workers with any loads, what they have of a prompt, and that prompt."""
    tokens = draw(st.integers(1, 400))
    made: dict[str, list[Card]] = {}
    for service, least in (("prefill", 0), ("decode", 1)):
        made[service] = [
            card(
                service,
                f"{service}-{number}",
                running=draw(st.integers(0, 20)),
                backlog=draw(st.integers(0, 2000)),
                pages_used=draw(st.integers(0, 100)),
                local_tokens=draw(st.sampled_from([0, 50, WHOLE_PROMPTS])) if service == "decode" else 0,
            )
            for number in range(draw(st.integers(least, 5)))
        ]
    most = (tokens - 1) // PAGE
    pages = {one.id: draw(st.integers(0, most)) for one in (*made["prefill"], *made["decode"])}
    return made["prefill"], made["decode"], pages, wanted(tokens, pages=draw(st.integers(0, 100)))


@given(_fleets(), st.integers(0, 3))
def test_whoever_reads_the_prompt_has_no_more_than_its_share(
    fleet: tuple[list[Card], list[Card], dict[str, int], Wanted], seed: int
):
    prefills, decodes, pages, request = fleet
    pair = _choose(request, prefills, decodes, pages=pages, seed=seed)
    roomy = [one for one in decodes if 100 - one.load.pages_used >= request.pages] or decodes
    rivals = roomy if pair.prefill is None else prefills
    assert next(one for one in rivals if one.id == (pair.prefill or pair.decode)).load.running <= _bound(rivals)
    assert pair.decode in {one.id for one in roomy}
    assert pair.matched_tokens == pages[pair.prefill or pair.decode] * PAGE
    assert pair.matched_tokens + pair.rest_tokens == request.tokens


@given(_fleets())
def test_a_decode_worker_reads_what_its_card_says_or_what_nobody_else_can(
    fleet: tuple[list[Card], list[Card], dict[str, int], Wanted],
):
    prefills, decodes, pages, request = fleet
    pair = _choose(request, prefills, decodes, pages=pages)
    roomy = [one for one in decodes if 100 - one.load.pages_used >= request.pages] or decodes
    near = [one for one in roomy if one.load.running <= _bound(roomy)]
    fitting = {one.id for one in near if request.tokens - pages[one.id] * PAGE <= one.local_tokens}
    if not prefills:
        assert pair.prefill is None
    elif fitting:
        assert pair.prefill is None
        assert pair.decode in fitting
    else:
        assert pair.prefill is not None


@given(_fleets())
def test_nobody_else_would_have_the_first_token_sooner(fleet: tuple[list[Card], list[Card], dict[str, int], Wanted]):
    """Among those within the bound, where somebody has some of it."""
    prefills, decodes, pages, request = fleet
    pair = _choose(request, prefills, [dataclasses.replace(one, local_tokens=0) for one in decodes], pages=pages)
    if pair.prefill is None:
        return
    near = [one for one in prefills if one.load.running <= _bound(prefills)]
    costs = {one.id: one.load.backlog_tokens + request.tokens - pages[one.id] * PAGE for one in near}
    slack = 0 if any(pages[one.id] for one in near) else request.tokens
    assert costs[pair.prefill] <= min(costs.values()) + slack


@given(st.binary(max_size=8), st.sets(st.text("abcdef", min_size=1, max_size=3), min_size=2, max_size=8))
def test_a_worker_that_leaves_moves_only_its_own_keys(key: bytes, workers: set[str]):
    there = [card("prefill", worker) for worker in workers]
    chosen = rendezvous(key, there)
    for gone in there:
        if gone is not chosen:
            assert rendezvous(key, [one for one in there if one is not gone]) == chosen


@pytest.mark.parametrize("pages", [{}, {"prefill-2": 2}])
def test_one_hot_prompt_spreads_over_all_workers(pages: dict[str, int]):
    """LESSONS, first table, 14: a shared prompt must not pin one worker, whether the index knows it or not."""
    loads = Loads()
    prefills, decodes = cards("prefill", 4), cards("decode", 4)
    counts: Counter[str | None] = Counter()
    for seed in range(100):
        pair = _choose(wanted(), prefills, decodes, loads, pages=pages, seed=seed)
        Booking(loads, pair)
        counts.update([pair.prefill, pair.decode])
    assert max(counts[one.id] for one in prefills) <= math.ceil(1.25 * 100 / 4) + 1
    assert max(counts[one.id] for one in decodes) - min(counts[one.id] for one in decodes) <= 1


def test_a_hot_prefix_spreads_over_workers_that_read_it_themselves():
    loads, decodes = Loads(), cards("decode", 4, local_tokens=WHOLE_PROMPTS)
    counts: Counter[str] = Counter()
    for seed in range(100):
        pair = _choose(wanted(), [], decodes, loads, pages={"decode-1": 2}, seed=seed)
        Booking(loads, pair)
        counts[pair.decode] += 1
    assert max(counts.values()) <= math.ceil(1.25 * 100 / 4) + 1
    assert len(counts) == 4


def test_a_page_or_two_do_not_draw_all_answers_to_one_worker():
    """Every chat begins with the same template."""
    loads, decodes = Loads(), cards("decode", 2, local_tokens=WHOLE_PROMPTS)
    counts: Counter[str] = Counter()
    for seed in range(8):
        pair = _choose(wanted(200), [], decodes, loads, pages={"decode-1": 2}, seed=seed)
        Booking(loads, pair).prompt_read()
        counts[pair.decode] += 1
    assert counts == {"decode-0": 4, "decode-1": 4}


def test_the_prefix_decides_while_its_worker_is_not_busy():
    prefills = cards("prefill", 3)
    for seed in range(20):
        assert _choose(wanted(), prefills, cards("decode", 1), pages={"prefill-1": 1}, seed=seed).prefill == "prefill-1"


def test_a_long_queue_outweighs_a_prefix():
    prefills = [card("prefill", "knows", backlog=1000), card("prefill", "idle")]
    assert _choose(wanted(40), prefills, cards("decode", 1), pages={"knows": 2}).prefill == "idle"
    assert _choose(wanted(2000), prefills, cards("decode", 1), pages={"knows": 100}).prefill == "knows"


def test_equal_beginnings_that_nobody_knows_meet():
    prefills, decodes = cards("prefill", 5), cards("decode", 2)
    shared = list(range(PAGE))
    chosen = {
        _choose(wanted([*shared, *range(100 + tail, 150)]), prefills, decodes, seed=tail).prefill for tail in range(30)
    }
    assert len(chosen) == 1
    others = {_choose(wanted([*range(n, n + 40)]), prefills, decodes, seed=n).prefill for n in range(60)}
    assert len(others) == 5


def test_a_queue_longer_than_the_prompt_is_not_waited_for_by_chance():
    """Rendezvous is a guess: it may cost no more than reading the prompt elsewhere."""
    for number in range(30):
        request = wanted([*range(number, number + 40)])
        prefills = [card("prefill", "busy", backlog=5000), card("prefill", "idle")]
        assert _choose(request, prefills, cards("decode", 1)).prefill == "idle"


def test_a_short_rest_is_read_by_the_decode_worker_that_has_the_rest():
    prefills, decodes = cards("prefill", 2), cards("decode", 3, local_tokens=10)
    pair = _choose(wanted(40), prefills, decodes, pages={"decode-2": 2, "prefill-0": 2})
    assert (pair.prefill, pair.decode, pair.matched_tokens, pair.rest_tokens) == (None, "decode-2", 32, 8)
    pair = _choose(wanted(44), prefills, decodes, pages={"decode-2": 2, "prefill-0": 2})
    assert (pair.prefill, pair.matched_tokens) == ("prefill-0", 32)


def test_what_a_decode_worker_was_given_since_its_card_counts_as_part_of_the_rest():
    """LESSONS, first table, 17, in tokens."""
    loads, prefills, decodes = Loads(), cards("prefill", 1), cards("decode", 1, local_tokens=30)
    first = _choose(wanted(20), prefills, decodes, loads)
    booking = Booking(loads, first)
    assert first.prefill is None
    assert _choose(wanted(20), prefills, decodes, loads).prefill is not None
    booking.prompt_read()
    assert _choose(wanted(20), prefills, decodes, loads).prefill is None


def test_workers_that_read_every_prompt_get_it_though_others_would():
    decodes = cards("decode", 3, local_tokens=WHOLE_PROMPTS)
    counts = Counter(_choose(wanted(5000), cards("prefill", 2), decodes, seed=seed).decode for seed in range(60))
    assert len(counts) == 3
    assert _choose(wanted(5000), cards("prefill", 2), decodes).prefill is None


def test_without_prefill_workers_any_decode_worker_reads():
    pair = _choose(wanted(5000), [], cards("decode", 2))
    assert (pair.prefill, pair.rest_tokens) == (None, 5000)


def test_requests_that_share_no_pages_are_not_drawn_to_any():
    decodes = cards("decode", 1, local_tokens=10)
    pair = _choose(wanted(40, shares=False), cards("prefill", 1), decodes, pages={"decode-0": 2})
    assert (pair.prefill, pair.matched_tokens, pair.rest_tokens) == ("prefill-0", 0, 40)


def test_equal_load_is_shared_at_random():
    counts = Counter(_choose(wanted(), cards("prefill", 1), cards("decode", 5), seed=n).decode for n in range(200))
    assert len(counts) == 5
    assert max(counts.values()) < 100


@pytest.mark.parametrize("local_tokens", [0, WHOLE_PROMPTS])
def test_the_least_loaded_decode_worker_with_room_is_taken(local_tokens: int):
    decodes = [
        card("decode", "full", pages_used=99, local_tokens=local_tokens),
        card("decode", "busy", running=9, local_tokens=local_tokens),
        card("decode", "ok", running=2, local_tokens=local_tokens),
    ]
    pair = _choose(wanted(pages=10), cards("prefill", 1), decodes, pages={"full": 2})
    assert pair.decode == "ok"
    assert _choose(wanted(pages=1000), cards("prefill", 1), decodes).decode == "full"


def test_workers_that_just_failed_are_the_last_choice():
    prefills, decodes = cards("prefill", 2), cards("decode", 2)
    request = wanted(avoid=frozenset({"prefill-0", "decode-1"}))
    pair = _choose(request, prefills, decodes, pages={"prefill-0": 2})
    assert (pair.prefill, pair.decode) == ("prefill-1", "decode-0")
    alone = _choose(request, prefills[:1], decodes[1:])
    assert (alone.prefill, alone.decode) == ("prefill-0", "decode-1")


def test_a_prompt_is_read_by_a_decode_worker_where_all_others_broke():
    """Those that are merely full are asked again; and so are all once a decode worker has failed too."""
    prefills, decodes = cards("prefill", 2), cards("decode", 2)
    both = frozenset({"prefill-0", "prefill-1"})
    assert _choose(wanted(avoid=both, broken=both), prefills, decodes).prefill is None
    assert _choose(wanted(avoid=both, broken=both - {"prefill-0"}), prefills, decodes).prefill is not None
    assert _choose(wanted(avoid=both - {"prefill-0"}, broken=both), prefills[:1], decodes).prefill is None
    assert _choose(wanted(avoid=both | {"decode-0"}, broken=both), prefills, decodes[:1]).prefill is not None


def test_only_workers_that_understand_each_other_are_paired():
    prefills = [card("prefill", "a", page_format="x"), card("prefill", "b", compute_class="gpu")]
    decodes = [card("decode", "c", compute_class="gpu"), card("decode", "d", page_format="y")]
    pair = _choose(wanted(), prefills, decodes)
    assert (pair.prefill, pair.decode, pair.compute_class) == ("b", "c", "gpu")
    pair = _choose(wanted(), prefills[:1], decodes)
    assert pair.prefill is None, "its own pages each understands"


def test_without_decode_workers_there_is_nobody():
    nobody = choose_pair(wanted(), cards("prefill", 2), [], Loads(), lambda keys, workers: {}, random.Random(1))
    assert nobody is None


def test_the_class_of_the_first_attempt_is_kept_where_possible():
    prefills = [card("prefill", "a", compute_class="x"), card("prefill", "b", compute_class="y")]
    decodes = [card("decode", "c", compute_class="x"), card("decode", "d", compute_class="y")]
    for kept in ("x", "y"):
        assert _choose(wanted(prefer_class=kept), prefills, decodes).compute_class == kept


@pytest.mark.parametrize("changed", [{"roots": ()}, {"model": "other"}, {"state": "draining"}, {"state": "starting"}])
def test_only_ready_workers_of_the_version_are_usable(changed: dict[str, object]):
    good = card("prefill", "a")
    assert usable([good], "m", ROOT) == [good]
    assert usable([dataclasses.replace(good, **changed)], "m", ROOT) == []  # type: ignore[arg-type]
