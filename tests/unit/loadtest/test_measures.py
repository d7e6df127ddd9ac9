"""The pure parts of hand-over, interference, growth and router: figures from what was observed."""

from __future__ import annotations

import math
import os
import time
from operator import attrgetter

import pytest

from loadtest.client import Observation
from loadtest.cpu import per_request, used_ms
from loadtest.grow.curves import Curve, render
from loadtest.handoff.summary import Moments, against, cost, moments, way, ways_ms, wire_ratio
from loadtest.interference.summary import Slo, figures, pooled
from loadtest.peers.base import Shape
from loadtest.router.flood import Flood, request
from loadtest.router.summary import figures as router_figures
from loadtest.router.summary import pooled as pooled_rounds


def answer(*chunks_s: float, tokens: int = 0, error: str | None = None) -> Observation:
    return Observation(0.0, chunks_s=list(chunks_s), output_tokens=tokens or len(chunks_s), error=error)


def test_the_handover_is_what_comes_between_the_first_tokens_besides_a_step() -> None:
    found = moments(answer(1.0, 1.15, 1.25, 1.35, 1.45))
    assert (found.first, found.step, found.handover) == pytest.approx((1000, 100, 50))
    with pytest.raises(ValueError, match="tells nothing"):
        moments(answer(1.0, 1.1))


def test_the_cost_of_a_handover_is_a_share_of_the_first_token() -> None:
    found = cost([Moments(1000, 100, 150), Moments(1200, 100, 160), Moments(900, 100, 140)])
    assert (found.first_ms, found.handover_ms, found.handover_share) == (1000, 50, 0.05)


def test_the_first_token_is_compared_prompt_by_prompt() -> None:
    apart = [Moments(first, 100, 150) for first in (1050, 2060, 3300)]
    together = [Moments(first, 100, 100) for first in (1000, 2000, 3000)]
    assert against(apart, together, attrgetter("first")) == pytest.approx(0.05)
    assert against(apart, [], attrgetter("first")) is None


def test_bytes_on_the_wire_are_held_against_fp16() -> None:
    assert wire_ratio(1000, tokens=10, shape=Shape(parameters=0, kv_values=100)) == 0.5


def test_a_tokens_way_is_from_its_worker_to_the_client() -> None:
    left, arrived = [[1.0, 2.0], [3.0], [4.0]], [[1.001, 2.003], [3.0, 3.1]]
    assert ways_ms(left, arrived) == pytest.approx([1.0, 3.0])
    assert way([1.0, 3.0])["p50_ms"] == 1.0


def test_goodput_counts_answers_that_meet_the_slo() -> None:
    slo = Slo(itl_p99_ms=100, ttft_ms=1000)
    steady, stalled = answer(0.1, 0.15, 0.2), answer(0.1, 0.15, 0.4)
    soon, late = answer(0.9, 0.95), answer(1.1, 1.15)
    found = figures([steady, stalled], [soon, late, answer(error="lost")], 2.0, slo)
    assert found.goodput_tokens_per_s == (3 + 2) / 2
    assert found.tokens_per_s == (3 + 3 + 2 + 2) / 2
    assert found.itl_p99_ms == pytest.approx(250)
    assert found.ttft_p50_ms == pytest.approx(900)
    assert found.failed == 1
    assert pooled([found, found, found]).failed == 3


@pytest.mark.parametrize("power", [0.5, 1.0, 2.0])
def test_a_curve_tells_how_fast_it_grows(power: float) -> None:
    curve = Curve("c", "x", "y")
    for x in (1, 2, 4, 8):
        for noise in (0.5, 1.0, 3.0):
            curve.add(x, noise * 7 * x**power)
    assert curve.points[0] == (1, 7)
    assert curve.exponent == pytest.approx(power)
    assert "exponent" in render([curve])


def test_a_curve_of_one_point_has_no_exponent() -> None:
    curve = Curve("c", "x", "y")
    curve.add(1, 5.0)
    assert math.isnan(curve.exponent)
    assert curve.as_json()["exponent"] is None


def test_router_figures_are_rates_and_percentiles() -> None:
    seen = Flood(2, began_s=10.0, ended_s=12.0, latencies_s=[0.004, 0.006, 0.005, 0.1], firsts_s=[0.001] * 4)
    seen.fail("lost")
    found = router_figures(1, seen)
    assert (found.requests_per_s, found.errors) == (2.0, 1)
    assert (found.p50_ms, found.p99_ms) == pytest.approx((5.0, 100.0))
    assert pooled_rounds([found, found]).errors == 2


def test_a_raw_request_is_one_that_servers_understand() -> None:
    head, _, body = request("http://127.0.0.1:80/", {"prompt": "é"}).partition(b"\r\n\r\n")
    assert head.startswith(b"POST /v1/completions HTTP/1.1\r\nHost: 127.0.0.1:80\r\n")
    assert f"Content-Length: {len(body)}".encode() in head


def test_processor_time_is_of_the_process_and_by_kind() -> None:
    before = used_ms({"router-0": os.getpid()})
    end = time.thread_time() + 0.05
    while time.thread_time() < end:
        math.sqrt(2)
    spent = per_request(before, used_ms({"router-0": os.getpid()}), requests=2)
    assert 20 <= spent["router"] < 1000
    assert per_request({"router-0": 1.0, "router-1": 2.0}, {"router-0": 3.0, "router-1": 6.0}, 2) == {"router": 3.0}
