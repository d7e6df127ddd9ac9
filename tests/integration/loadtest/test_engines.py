"""Engines in processes of their own, and the commands that compare and measure, each once on a tiny model."""

from __future__ import annotations

import json
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from loadtest.__main__ import main
from loadtest.peers.base import Sources, Unusable
from loadtest.peers.remote import prepare, serving
from loadtest.tiny import tiny_checkpoint

PROMPTS = [[1, 2, 3, 4] * 8, [5, 6, 7, 8] * 8]


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_checkpoint(tmp_path_factory.mktemp("tiny"))


def sources(tiny: Path, cache: Path) -> Sources:
    return Sources(None, tiny, cache)


async def test_our_engine_runs_in_a_process_of_its_own(tiny: Path, tmp_path: Path) -> None:
    known = sources(tiny, tmp_path)
    path = await prepare(sys.executable, "pdbus fp32", known)
    async with serving(sys.executable, "pdbus fp32", known, path, 1) as engine:
        timing = await engine.generate(PROMPTS, 5)
        assert timing.new_tokens == 5
        assert 0 < timing.first_s < timing.total_s
        assert engine.peak_bytes > 50_000_000
        assert engine.weights.kv_token_bytes == 2 * 2 * 32 * 4
        process = engine.process
    assert process.returncode == 0


async def test_an_engine_that_fails_tells_why_and_leaves_no_process(tiny: Path, tmp_path: Path) -> None:
    known = sources(tiny, tmp_path)
    with pytest.raises(Unusable, match="no such folder or file"):
        async with serving(sys.executable, "pdbus fp32", known, tmp_path / "absent", 1):
            pass
    with pytest.raises(Unusable, match="the engine failed"):
        async with serving(sys.executable, "pdbus fp32", known, tiny, 1) as engine:
            await engine.generate([[10**6]], 3)  # beyond the vocabulary


@pytest.mark.skipif(find_spec("ctranslate2") is not None, reason="it is installed here")
async def test_one_that_is_not_installed_is_told_in_one_line(tiny: Path, tmp_path: Path) -> None:
    with pytest.raises(Unusable, match="ctranslate2 is not installed"):
        await prepare(sys.executable, "CTranslate2 int8", sources(tiny, tmp_path))


def test_engine_compares_us_with_a_peer(tiny: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    report = tmp_path / "engine.json"
    arguments = ["engine", "--peers", "--only", "pdbus fp32", "transformers", "--columns", "decode@32", "--rounds", "1"]
    assert (
        main([*arguments, "--threads", "1", "--model", str(tiny), "--cache", str(tmp_path), "--json", str(report)]) == 0
    )
    found = json.loads(report.read_text())
    assert set(found["medians"]) == {"pdbus fp32", "pdbus fp32, whole stack", "transformers fp32"}
    assert found["ratio_to_best"]["pdbus fp32"]["decode@32"] > 0
    assert found["bandwidth_bytes_per_s"] > 1e8
    assert "pdbus fp32, whole stack ÷ best peer" in capsys.readouterr().out


def test_router_measures_real_routers(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    report = tmp_path / "router.json"
    arguments = ["router", "--routers", "2", "--streams", "1", "4", "--duration", "0.5", "--rounds", "1"]
    assert main([*arguments, "--json", str(report)]) == 0
    medians = json.loads(report.read_text())["medians"]
    assert [(row["routers"], row["streams"], row["errors"]) for row in medians] == [(2, 1, 0), (2, 4, 0)]
    assert all(row["requests_per_s"] > 1 and 0 < row["first_p50_ms"] <= row["p50_ms"] for row in medians)
    assert "req/s" in capsys.readouterr().out


@pytest.mark.slow
@pytest.mark.timeout(300)  # four stacks, two of them at once
def test_tiers_finds_a_warm_prefix(tiny: Path, tmp_path: Path) -> None:
    report = tmp_path / "tiers.json"
    arguments = ["tiers", "--tokens", "256", "--samples", "1", "--rounds", "1", "--sessions", "2", "--pairs", "1"]
    assert main([*arguments, "--model", str(tiny), "--json", str(report)]) == 0
    found = json.loads(report.read_text())
    assert set(found["tiers"]) == {"cold", "L1", "L2", "L3"}
    assert found["tiers"]["cold"]["cached_tokens"] == 0
    assert found["tiers"]["L1"]["cached_tokens"] == 256
    assert found["trace"]["hit"] > 0.9
    assert min(found["cold"]["with_nodes_ms"], found["cold"]["without_ms"]) > 0


@pytest.mark.slow
def test_handoff_counts_bytes_and_the_way_of_a_token(tiny: Path, tmp_path: Path) -> None:
    report = tmp_path / "handoff.json"
    arguments = ["handoff", "--tokens", "256", "--samples", "1", "--rounds", "1"]
    assert main([*arguments, "--model", str(tiny), "--json", str(report)]) == 0
    found = json.loads(report.read_text())
    assert found["wire"]["bytes"] > 256 * 2 * 2 * 32  # fp16 is the least that anything here sends
    assert 0 < found["way_of_a_token"]["p50_ms"] < 1000
    assert found["costs"]["disaggregated"]["first_ms"] > 0


@pytest.mark.slow
def test_interference_reports_both_ways_or_why_not(tiny: Path, tmp_path: Path) -> None:
    report = tmp_path / "interference.json"
    arguments = ["interference", "--duration", "2", "--rate", "1", "--rounds", "1", "--prompt-tokens", "256"]
    assert main([*arguments, "--stream-tokens", "16", "--model", str(tiny), "--json", str(report)]) == 0
    found = json.loads(report.read_text())
    assert found["medians"]["disaggregated"]["tokens_per_s"] > 0
    assert found["medians"].keys() | found["refused"].keys() == {"disaggregated", "colocated"}


@pytest.mark.slow
def test_grow_writes_numbers_for_every_curve(tiny: Path, tmp_path: Path) -> None:
    arguments = ["grow", "--rounds", "1", "--lengths", "64", "256", "--batches", "1", "2", "--contexts", "64"]
    arguments += ["--workers", "1", "--routers", "1", "--requests", "2", "--duration", "0.5", "--out", str(tmp_path)]
    assert main([*arguments, "--model", str(tiny)]) == 0
    curves = json.loads((tmp_path / "grow.json").read_text())["curves"]
    assert len(curves) == 5
    assert all(curve["points"] for curve in curves)
    if find_spec("matplotlib"):
        assert len(list(tmp_path.glob("*.png"))) == 5
