"""The ring places keys alike in every process, evenly, and moves few of them."""

from __future__ import annotations

import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdbus.caching.ring import HashRing

KEYS = [f"key {number}".encode() for number in range(2000)]
names = st.lists(st.text("abcdef0123456789-", min_size=1, max_size=12), min_size=1, max_size=8, unique=True)
GOLDEN = {
    b"": ("cache-2", "cache-1"),
    b"key 0": ("cache-1", "cache-0"),
    b"key 1": ("cache-1", "cache-0"),
    b"\xff" * 32: ("cache-2", "cache-1"),
}
"""Recorded once. A change here strands every entry of a running fleet."""


def test_golden_vectors() -> None:
    ring = HashRing(["cache-0", "cache-1", "cache-2"])
    assert {key: ring.owners(key, 2) for key in GOLDEN} == GOLDEN


def test_other_processes_place_alike() -> None:
    code = "from pdbus.caching.ring import HashRing; print(HashRing({'a', 'b', 'c'}).owners(b'key', 3))"
    told = {
        subprocess.run(
            [sys.executable, "-c", code], env={"PYTHONHASHSEED": seed}, capture_output=True, text=True, check=True
        ).stdout
        for seed in ("1", "2")
    }
    assert told == {f"{HashRing(['c', 'a', 'b']).owners(b'key', 3)}\n"}


@given(nodes=names, key=st.binary(max_size=40), count=st.integers(0, 10))
def test_owners_are_different_nodes_of_the_ring_in_any_order_of_joining(
    nodes: list[str], key: bytes, count: int
) -> None:
    owners = HashRing(nodes).owners(key, count)
    assert len(owners) == len(set(owners)) == min(count, len(nodes))
    assert set(owners) <= set(nodes)
    assert owners == HashRing(reversed(nodes + nodes)).owners(key, count)


def test_an_empty_ring_owns_nothing() -> None:
    assert HashRing([]).owners(b"key", 2) == ()


@given(nodes=names.filter(lambda names: len(names) > 1), key=st.binary(max_size=40), data=st.data())
def test_when_a_node_leaves_its_keys_go_to_their_replicas_and_no_other_moves(
    nodes: list[str], key: bytes, data: st.DataObject
) -> None:
    gone = data.draw(st.sampled_from(nodes))
    before = HashRing(nodes).owners(key, len(nodes))
    after = HashRing(node for node in nodes if node != gone).owners(key, len(nodes))
    assert after == tuple(node for node in before if node != gone)


@pytest.mark.parametrize("count", [2, 3, 8])
def test_a_joining_node_takes_about_its_share(count: int) -> None:
    old = HashRing(f"cache-{number}" for number in range(count))
    new = HashRing(f"cache-{number}" for number in range(count + 1))
    moved = [key for key in KEYS if old.owners(key, 1) != new.owners(key, 1)]
    assert all(new.owners(key, 1) == (f"cache-{count}",) for key in moved)
    assert 0.5 < len(moved) / len(KEYS) * (count + 1) < 1.6


def test_load_is_even() -> None:
    ring = HashRing(f"cache-{number}" for number in range(5))
    shares = [sum(ring.owners(key, 1) == (node,) for key in KEYS) * 5 / len(KEYS) for node in ring.nodes]
    assert 0.7 < min(shares) <= max(shares) < 1.35
