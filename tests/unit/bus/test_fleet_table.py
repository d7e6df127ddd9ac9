"""The fleet's table: freshness, incarnations, and what counts as news."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from pdbus.bus.fleet_table import DEAD_AFTER_S, FORGET_AFTER_S, FleetTable
from pdbus.messages.presence import Card, Load

CARD = Card("prefill", "p-0", "life-1", 1, "ready", "m")


def test_silence_makes_suspect_then_dead_and_a_card_makes_live_again() -> None:
    table = FleetTable()
    assert table.state("p-0", 0.0) == "dead"
    assert table.see(CARD, 10.0)
    assert [table.state("p-0", at) for at in (10.0, 11.0, 11.1, 11.9, 12.0)] == [
        "live",
        "live",
        "suspect",
        "suspect",
        "dead",
    ]
    assert table.tick(11.5)
    assert not table.tick(11.6)
    assert table.tick(12.5)
    assert table.live("prefill", 12.5) == ()
    assert table.see(replace(CARD, seq=2), 13.0)
    assert table.live("prefill", 13.0) == (replace(CARD, seq=2),)


def test_load_is_no_news_but_is_kept() -> None:
    table = FleetTable()
    table.see(CARD, 0.0)
    busy = replace(CARD, seq=2, load=Load(running=3), progress=5)
    assert not table.see(busy, 0.5)
    assert table.card("p-0") == busy
    assert table.see(replace(busy, seq=3, roots=(bytes(32),)), 0.6)


def test_each_of_many_publishers_has_its_own_load() -> None:
    """LESSONS 13: one metric that all of them write would tell the last one's."""
    table = FleetTable()
    for seq in range(1, 4):
        for number in range(3):
            table.see(replace(CARD, id=f"r-{number}", seq=seq, load=Load(running=10 * number + seq)), 0.1 * seq)
    assert {card.id: card.load.running for card in table.live("prefill", 0.4)} == {"r-0": 3, "r-1": 13, "r-2": 23}


def test_a_new_life_replaces_the_old_one_whose_late_cards_are_ignored() -> None:
    table = FleetTable()
    table.see(replace(CARD, seq=900), 0.0)
    new = replace(CARD, incarnation="life-2", seq=1)
    assert table.see(new, 0.1)
    assert not table.see(replace(CARD, seq=901), 0.2)
    assert table.card("p-0") == new


def test_the_long_dead_are_forgotten() -> None:
    table = FleetTable()
    table.see(CARD, 0.0)
    table.tick(FORGET_AFTER_S - 1)
    assert table.cards() == (CARD,)
    table.tick(FORGET_AFTER_S + 1)
    assert table.cards() == ()


def test_the_time_in_which_this_process_slept_is_nobody_s_silence() -> None:
    table = FleetTable()
    table.see(CARD, 0.0)
    table.stalled(30.0)
    assert table.state("p-0", 30.5) == "live"


@given(st.lists(st.tuples(st.sampled_from(["life-1", "life-2", "life-3"]), st.integers(1, 20)), max_size=60))
def test_nothing_older_replaces_something_newer(arrivals: list[tuple[str, int]]) -> None:
    table = FleetTable()
    lives: list[str] = []
    newest: dict[str, int] = {}
    for at, (life, seq) in enumerate(arrivals):
        table.see(replace(CARD, incarnation=life, seq=seq), float(at))
        if life not in lives:
            lives.append(life)
        if life == lives[-1]:
            newest[life] = max(seq, newest.get(life, 0))
        shown = table.card("p-0")
        assert shown is not None
        assert (shown.incarnation, shown.seq) == (lives[-1], newest[lives[-1]])


def test_live_means_heard_within_a_second() -> None:
    table = FleetTable()
    for number in range(5):
        table.see(replace(CARD, id=f"p-{number}"), number * 0.5)
    assert [card.id for card in table.live("prefill", 2.0)] == ["p-2", "p-3", "p-4"]
    assert table.live("decode", 2.0) == ()
    assert table.state("p-0", DEAD_AFTER_S) == "dead"
