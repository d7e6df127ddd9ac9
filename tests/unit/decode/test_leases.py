"""A lease takes exactly the KV that was announced, once and in order, and ends without progress."""

from __future__ import annotations

import zlib
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdbus.decode.leases import LEASE_S, Leases, PageLease
from pdbus.errors import Corrupt
from pdbus.kv.format import PageFormat
from pdbus.kv.pages import PageTable
from pdbus.messages.bulk import KvHead
from pdbus.messages.decode import KvFinal, Reserve
from pdbus.messages.router import TokenItem

FORMAT = PageFormat(layers=2, kv_heads=1, head_dim=2, page_tokens=4)
ROOT = bytes(32)
RESERVE = Reserve("r", 0, 1, "router", ROOT, 10, "p", str(FORMAT), "class", 0)


def lease(now_s: float = 0.0, reserve: Reserve = RESERVE) -> PageLease:
    hold = PageTable(20).hold()
    hold.allocate(FORMAT.pages_for(reserve.tokens + 1))
    return PageLease(reserve, hold, now_s)


def body(tokens: int) -> bytes:
    return bytes([tokens]) * (FORMAT.pages_for(tokens) * FORMAT.layer_bytes)


def head(layer: int, start: int, tokens: int) -> KvHead:
    return KvHead(1, ROOT, layer, start, tokens)


def final(one: PageLease, **changed: object) -> KvFinal:
    first = TokenItem("r", 0, 1, ROOT, 0, (5,))
    return replace(KvFinal(1, ROOT, 10, b"", one.frames, one.checksum, first), **changed)  # type: ignore[arg-type]


@given(st.permutations([(0, 0), (0, 8), (1, 0), (1, 8)]).filter(lambda order: _in_order(order)))
def test_layers_arrive_in_any_order_and_their_chunks_in_order(order: list[tuple[int, int]]) -> None:
    one = lease()
    checksum = 0
    for layer, start in order:
        tokens = 8 if start == 0 else 2
        pages = one.take(head(layer, start, tokens), body(tokens), FORMAT)
        assert pages == one.hold.pages[start // 4 : FORMAT.pages_for(start + tokens)]
        checksum = zlib.crc32(body(tokens), checksum)
    one.finish(final(one, frames=4, checksum=checksum), FORMAT)
    assert one.final


def test_several_layers_come_in_one_frame() -> None:
    one = lease()
    both = replace(head(0, 0, 8), layers=2)
    assert one.take(both, body(8) * 2, FORMAT) == one.hold.pages[:2]
    one.take(head(1, 8, 2), body(2), FORMAT)
    one.take(head(0, 8, 2), body(2), FORMAT)
    assert one.arrived == {0: 10, 1: 10}
    assert one.frames == 3


def _in_order(order: list[tuple[int, int]]) -> bool:
    return all(order.index((layer, 0)) < order.index((layer, 8)) for layer in (0, 1))


@pytest.mark.parametrize(
    "wrong",
    [
        replace(head(0, 0, 8), attempt=2),
        replace(head(0, 0, 8), root=b"x" * 32),
        head(-2, 0, 8),
        head(2, 0, 8),
        head(0, 4, 8),
        head(0, -4, 8),
        head(0, 0, 0),
        head(0, 0, 12),
        head(0, 0, 6),
        head(0, 0, 4),
        replace(head(0, 0, 8), layers=2),
        replace(head(1, 0, 4), layers=2),
        replace(head(0, 0, 8), layers=0),
        replace(head(1, 0, 8), layers=-1),
    ],
    ids=str,
)
def test_a_frame_that_does_not_fit_is_corrupt_and_counts_for_nothing(wrong: KvHead) -> None:
    one = lease()
    with pytest.raises(Corrupt):
        one.take(wrong, body(8), FORMAT)
    assert (one.frames, one.checksum, one.arrived) == (0, 0, {})


def test_a_frame_that_comes_twice_is_corrupt() -> None:
    one = lease()
    one.take(head(0, 0, 10), body(10), FORMAT)
    with pytest.raises(Corrupt):
        one.take(head(0, 0, 10), body(10), FORMAT)
    with pytest.raises(Corrupt):
        one.take(head(0, 10, 1), body(1), FORMAT)


@pytest.mark.parametrize(
    "wrong",
    [
        {"attempt": 2},
        {"root": b"x" * 32},
        {"tokens": 9},
        {"frames": 1},
        {"checksum": 0},
        {"first": TokenItem("other", 0, 1, ROOT, 0, (5,))},
        {"first": TokenItem("r", 1, 1, ROOT, 0, (5,))},
        {"first": TokenItem("r", 0, 2, ROOT, 0, (5,))},
        {"first": TokenItem("r", 0, 1, b"x" * 32, 0, (5,))},
    ],
    ids=str,
)
def test_a_final_frame_that_does_not_fit_is_corrupt(wrong: dict[str, object]) -> None:
    one = lease()
    for layer in (0, 1):
        one.take(head(layer, 0, 10), body(10), FORMAT)
    with pytest.raises(Corrupt):
        one.finish(final(one, **wrong), FORMAT)
    assert one.final is None


def test_a_final_frame_before_all_layers_is_corrupt() -> None:
    one = lease()
    one.take(head(0, 0, 10), body(10), FORMAT)
    with pytest.raises(Corrupt):
        one.finish(final(one), FORMAT)


def test_a_lease_ends_without_progress_and_not_once_it_is_complete() -> None:
    leases = Leases(8)
    one, other = lease(0.0), lease(5.0, replace(RESERVE, choice=1))
    leases.add(one)
    leases.add(other)
    assert leases.expired(LEASE_S - 0.1) == []
    assert leases.expired(LEASE_S) == [one]
    one.renewed_s = LEASE_S
    assert leases.expired(LEASE_S + 5.0) == [other]
    other.final = final(other)
    assert leases.expired(LEASE_S + 5.0) == []


def test_a_lease_is_removed_once_and_only_by_itself() -> None:
    leases = Leases(1)
    one = lease()
    leases.add(one)
    assert leases.full
    with pytest.raises(ValueError, match="exists already"):
        leases.add(lease())
    assert not leases.remove(lease())
    assert leases.remove(one)
    assert not leases.remove(one)
    assert leases.get(one.key) is None
    assert len(leases) == 0
