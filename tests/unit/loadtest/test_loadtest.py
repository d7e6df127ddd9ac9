"""The load generator: arrivals, scenarios, figures, and a whole run against a small server of the test's own."""

from __future__ import annotations

import asyncio
import itertools
import json
import math
import random

import pytest
from aiohttp import web
from hypothesis import given
from hypothesis import strategies as st

from loadtest.__main__ import main
from loadtest.arrivals import poisson
from loadtest.client import Observation
from loadtest.report import percentile, summarize, table
from loadtest.scenarios import SCENARIOS


def test_arrivals_are_poisson_and_repeatable() -> None:
    times = poisson(50, 200, seed=1)
    assert times == poisson(50, 200, seed=1) != poisson(50, 200, seed=2)
    assert times == sorted(times)
    assert times[-1] < 200
    assert len(times) == pytest.approx(10_000, abs=400)  # 4 standard deviations
    gaps = [b - a for a, b in itertools.pairwise(times)]
    mean = sum(gaps) / len(gaps)
    deviation = math.sqrt(sum((gap - mean) ** 2 for gap in gaps) / len(gaps))
    assert deviation == pytest.approx(mean, rel=0.1)  # exponential gaps: deviation equals mean


@pytest.mark.parametrize(("rate", "duration"), [(0, 1), (-1, 1), (1, 0)])
def test_a_rate_that_makes_no_sense_is_refused(rate: float, duration: float) -> None:
    with pytest.raises(ValueError, match="positive"):
        poisson(rate, duration, seed=0)


@given(st.lists(st.floats(0, 1e6), min_size=1), st.floats(1, 100))
def test_percentile_is_a_value_with_that_share_at_or_below(values: list[float], percent: float) -> None:
    found = percentile(values, percent)
    assert found in values
    assert sum(value <= found for value in values) >= percent / 100 * len(values) - 1e-9


@pytest.mark.parametrize("name", SCENARIOS)
def test_scenarios_are_repeatable_bodies(name: str) -> None:
    first, again = (
        [SCENARIOS[name].draw(rng, number) for number in range(20)] for rng in (random.Random(3), random.Random(3))
    )
    assert first == again
    assert all(body["messages"] and body["max_tokens"] > 0 for body in first)


def test_latency_counts_from_the_due_time() -> None:
    seen = Observation(due_s=1.0, sent_s=1.5, chunks_s=[2.0, 2.1, 2.4], end_s=2.5, output_tokens=3, finish="stop")
    failed = Observation(due_s=1.0, sent_s=1.0, end_s=1.2, error="503: busy")
    report = summarize("u", "short", [seen, failed])
    assert report.ttft_ms["p50"] == pytest.approx(1000)
    assert report.itl_ms["p99"] == pytest.approx(300)
    assert report.late_ms["p99"] == pytest.approx(500)
    assert (report.sent, report.completed, report.errors) == (2, 1, {"503: busy": 1})
    assert "503: busy" in table([report])
    json.dumps(report.as_json(), allow_nan=False)


async def _server(requests: list[dict[str, object]]) -> tuple[web.AppRunner, str]:
    async def models(_: web.Request) -> web.Response:
        return web.json_response({"data": [{"id": "toy"}]})

    async def chat(request: web.Request) -> web.StreamResponse:
        body = await request.json()
        requests.append(body)
        if len(requests) % 5 == 0:
            return web.json_response({"error": {"message": "busy"}}, status=429)
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        for text, finish in (("a", None), ("b", None), (None, "stop")):
            chunk = {"choices": [{"delta": {"content": text} if text else {}, "finish_reason": finish}]}
            await response.write(f"data: {json.dumps(chunk)}\n\n".encode())
        usage = {"prompt_tokens": 4, "completion_tokens": 2, "prompt_tokens_details": {"cached_tokens": 1}}
        await response.write(f"data: {json.dumps({'choices': [], 'usage': usage})}\n\ndata: [DONE]\n\n".encode())
        return response

    app = web.Application()
    app.add_routes([web.get("/v1/models", models), web.post("/v1/chat/completions", chat)])
    runner = web.AppRunner(app)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    host, port = runner.addresses[0][:2]
    return runner, f"http://{host}:{port}"


async def test_the_same_load_runs_on_a_server_and_its_peer(tmp_path, capsys) -> None:  # type: ignore[no-untyped-def]
    ours: list[dict[str, object]] = []
    theirs: list[dict[str, object]] = []
    runner, url = await _server(ours)
    peer_runner, peer = await _server(theirs)
    try:
        argv = ["short", "--url", url, "--peer", peer, "--rate", "200", "--duration", "0.2", "--rounds", "2"]
        code = await asyncio.to_thread(main, [*argv, "--json", str(tmp_path / "out.json")])
    finally:
        await runner.cleanup()
        await peer_runner.cleanup()
    key = lambda body: str(body["messages"])  # noqa: E731
    assert sorted(ours, key=key) == sorted(theirs, key=key)
    assert ours[0]["model"] == "toy"
    first, second = json.loads((tmp_path / "out.json").read_text())
    assert first["sent"] == second["sent"] == len(ours)
    assert first["errors"] == {"429: busy": len(ours) // 5}
    assert first["completed"] == len(ours) - len(ours) // 5
    assert first["output_tokens"] == 2 * first["completed"]
    assert first["cached_tokens"] == first["completed"]
    assert code == 1  # some requests failed
    assert url in capsys.readouterr().out


def test_an_unknown_scenario_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["nonsense"])
    assert "no scenario nonsense" in capsys.readouterr().err
