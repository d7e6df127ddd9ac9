"""How much of the disk each tenant has, whatever is stored, replaced and expires."""

from __future__ import annotations

import hypothesis.strategies as st
import pytest
from hypothesis import given, settings

from pdbus.errors import QuotaExceeded
from pdbus.router.jobs.disk_use import STEP_S, DiskUse
from pdbus.router.jobs.shares import Shares
from pdbus.subjects import FILES, RESULTS

KEPT_S = 48 * 3600.0
steps = st.tuples(
    st.sampled_from("ab"), st.sampled_from("xyz"), st.integers(0, 1000), st.floats(0, 20_000), st.booleans()
)


@settings(max_examples=40, deadline=None)
@given(st.lists(steps, max_size=40))
def test_it_is_the_sum_of_what_is_there_to_ten_minutes(events: list[tuple[str, str, int, float, bool]]) -> None:
    use, there, now = DiskUse(KEPT_S), list[tuple[str, str, int, float]](), 0.0
    for tenant, name, size, passes_s, replaces in events:
        now += passes_s
        if replaces:
            there = [one for one in there if one[:2] != (tenant, name)]
        there.append((tenant, name, size, now))
        use.stored(tenant, name, size, now, replaces=replaces)
        for who in "ab":
            least = sum(size for tenant, _, size, at_s in there if tenant == who and now < at_s + KEPT_S)
            most = sum(size for tenant, _, size, at_s in there if tenant == who and now < at_s + KEPT_S + 2 * STEP_S)
            assert least <= use.used(who, now) <= most
    assert use.used("a", now + KEPT_S + 2 * STEP_S) == use.used("b", now + KEPT_S + 2 * STEP_S) == 0


@settings(max_examples=40, deadline=None)
@given(st.lists(st.tuples(st.sampled_from("xyz"), st.integers(0, 100)), max_size=40))
def test_what_is_reserved_is_what_was_said_last(events: list[tuple[str, int]]) -> None:
    use, known = DiskUse(KEPT_S), dict[str, int]()
    for name, size in events:
        use.reserve("t", name, size, 0.0)
        known[name] = size
        assert use.used("t", 0.0) == sum(known.values())
    assert use.used("t", KEPT_S + 2 * STEP_S) == 0


def test_what_is_gone_is_forgotten_also_of_a_tenant_whom_nobody_asks_about() -> None:
    """Another router has all of its requests; this one only hears of what that stores."""
    use = DiskUse(KEPT_S)
    for number in range(10 * int(KEPT_S // STEP_S)):
        use.stored("t", f"file-{number}", 1, number * float(STEP_S))
        use.reserve("t", f"job-{number}", 1, number * float(STEP_S))
    known = use._tenants["t"]
    assert max(len(known.steps), len(known.reserved)) <= KEPT_S / STEP_S + 3


def test_a_refusal_tells_when_there_is_room_again_by_itself() -> None:
    now = 0.0
    shares = Shares(1000, lambda: now)
    shares.uses[FILES.stream].stored("t", "f", 400, 0.0)
    shares.uses[RESULTS.stream].stored("t", "", 600, 7200.0)
    shares.check("other", 1000)
    waits = []
    for size in (1, 400, 401, 1000):
        with pytest.raises(QuotaExceeded) as refused:
            shares.check("t", size)
        waits.append(refused.value.retry_after_s)
    first, second = KEPT_S + STEP_S, 7200 + KEPT_S + STEP_S
    assert waits == [first, first, second, second]
    with pytest.raises(QuotaExceeded) as refused:
        shares.check("t", 1001)
    assert refused.value.retry_after_s is None, "never"
    now = first
    shares.check("t", 400)


def test_what_is_on_its_way_counts_and_no_longer_than_that() -> None:
    shares = Shares(1000, lambda: 0.0)
    with shares.hold("t", 600):
        assert shares.full("t", 500)
        assert not shares.full("other", 500)
        with pytest.raises(QuotaExceeded), shares.hold("t", 401):
            pass
    with pytest.raises(ValueError, match="odd"), shares.hold("t", 1000):
        raise ValueError("odd")
    assert not shares.full("t", 1000)
