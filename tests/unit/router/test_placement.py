"""Which workers take a request: affinity within a bound on load, never a dead or foreign one, ties at random."""

from __future__ import annotations

import math
import random
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdbus.messages.presence import Card, Load
from pdbus.router.placement import LOAD_BOUND, Loads, bounded_rendezvous, choose_pair, usable

ROOT = b"r" * 32


def _card(service: str, id: str, *, running: int = 0, seq: int = 1, **fields: object) -> Card:
    load = Load(running=running, pages_total=100, pages_used=int(str(fields.pop("pages_used", 0))))
    values = {"roots": (ROOT,), "page_format": "f", "compute_class": "c"} | fields
    return Card(service, id, "i", seq, "ready", "m", load=load, **values)  # type: ignore[arg-type]


def _cards(service: str, count: int) -> list[Card]:
    return [_card(service, f"{service}-{number}") for number in range(count)]


_LOADS = st.dictionaries(st.text("abcdef", min_size=1, max_size=3), st.integers(0, 50), min_size=1, max_size=8)


@given(st.binary(max_size=8), _LOADS)
def test_load_stays_within_the_bound(key: bytes, loads: dict[str, int]):
    chosen = bounded_rendezvous(key, loads)
    assert loads[chosen] + 1 <= math.ceil(LOAD_BOUND * (sum(loads.values()) + 1) / len(loads))


@given(st.binary(max_size=8), st.sets(st.text("abcdef", min_size=1, max_size=3), min_size=2, max_size=8))
def test_a_worker_that_leaves_moves_only_its_own_keys(key: bytes, workers: set[str]):
    chosen = bounded_rendezvous(key, dict.fromkeys(workers, 0))
    for gone in workers - {chosen}:
        assert bounded_rendezvous(key, dict.fromkeys(workers - {gone}, 0)) == chosen


def test_one_hot_prompt_spreads_over_all_workers():
    """LESSONS, first table, 14: a shared prompt must not pin one worker."""
    loads = Loads()
    prefills, decodes = _cards("prefill", 4), _cards("decode", 4)
    booked: Counter[str] = Counter()
    for _ in range(100):
        pair = choose_pair(b"hot", prefills, decodes, loads, rng=random.Random(1))
        assert pair is not None
        loads.book(pair.prefill, pair.decode)
        booked.update([pair.prefill, pair.decode])
    counts = [booked[card.id] for card in prefills]
    assert max(counts) <= math.ceil(1.25 * 100 / 4) + 1
    assert max(booked[card.id] for card in decodes) - min(booked[card.id] for card in decodes) <= 1


def test_a_burst_between_two_cards_counts():
    """LESSONS, first table, 17: credit dispatches that no card has reported yet."""
    loads, card = Loads(), _card("decode", "d", running=3)
    assert loads.of(card) == 3
    loads.book("d")
    loads.book("d")
    assert loads.of(card) == 5
    assert loads.of(_card("decode", "d", running=5, seq=2)) == 5
    loads.release("d")
    loads.release("d")
    assert loads.idle


def test_equal_load_is_shared_at_random():
    rng = random.Random(7)
    pairs = [choose_pair(b"k", _cards("prefill", 1), _cards("decode", 5), Loads(), rng=rng) for _ in range(200)]
    counts = Counter(pair.decode for pair in pairs if pair)
    assert len(counts) == 5
    assert max(counts.values()) < 100


def test_the_least_loaded_decode_worker_with_room_is_taken():
    decodes = [
        _card("decode", "full", pages_used=99),
        _card("decode", "busy", running=9),
        _card("decode", "ok", running=2),
    ]
    pair = choose_pair(b"k", _cards("prefill", 1), decodes, Loads(), pages=10, rng=random.Random(1))
    assert pair is not None
    assert pair.decode == "ok"


def test_workers_that_just_failed_are_the_last_choice():
    prefills, decodes = _cards("prefill", 2), _cards("decode", 2)
    avoid = frozenset({"prefill-0", "decode-1"})
    pair = choose_pair(b"k", prefills, decodes, Loads(), avoid=avoid, rng=random.Random(1))
    assert pair is not None
    assert (pair.prefill, pair.decode) == ("prefill-1", "decode-0")
    alone = choose_pair(b"k", prefills[:1], decodes[1:], Loads(), avoid=avoid, rng=random.Random(1))
    assert alone is not None


def test_only_workers_that_understand_each_other_are_paired():
    prefills = [_card("prefill", "a", page_format="x"), _card("prefill", "b", compute_class="gpu")]
    decodes = [_card("decode", "c", compute_class="gpu"), _card("decode", "d", page_format="y")]
    pair = choose_pair(b"k", prefills, decodes, Loads(), rng=random.Random(1))
    assert pair is not None
    assert (pair.prefill, pair.decode, pair.compute_class) == ("b", "c", "gpu")
    assert choose_pair(b"k", prefills[:1], decodes, Loads(), rng=random.Random(1)) is None


def test_the_class_of_the_first_attempt_is_kept_where_possible():
    prefills = [_card("prefill", "a", compute_class="x"), _card("prefill", "b", compute_class="y")]
    decodes = [_card("decode", "c", compute_class="x"), _card("decode", "d", compute_class="y")]
    for wanted in ("x", "y"):
        pair = choose_pair(b"k", prefills, decodes, Loads(), prefer_class=wanted, rng=random.Random(1))
        assert pair is not None
        assert pair.compute_class == wanted


@pytest.mark.parametrize("changed", [{"roots": ()}, {"model": "other"}, {"state": "draining"}, {"state": "starting"}])
def test_only_ready_workers_of_the_version_are_usable(changed: dict[str, object]):
    import dataclasses

    good = _card("prefill", "a")
    assert usable([good], "m", ROOT) == [good]
    assert usable([dataclasses.replace(good, **changed)], "m", ROOT) == []  # type: ignore[arg-type]
