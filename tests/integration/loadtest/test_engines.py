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
from pdbus.native.build import levels

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


@pytest.mark.slow
@pytest.mark.timeout(300)  # two stacks, and a peer
def test_engine_compares_us_with_a_peer(tiny: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    report = tmp_path / "engine.json"
    arguments = ["engine", "--peers", "--only", "pdbus fp32", "transformers", "--columns", "decode@32", "--rounds", "1"]
    assert (
        main([*arguments, "--threads", "1", "--model", str(tiny), "--cache", str(tmp_path), "--json", str(report)]) == 0
    )
    found = json.loads(report.read_text())
    ours = {"pdbus fp32", "pdbus fp32, stack, apart", "pdbus fp32, stack, colocated"}
    assert set(found["medians"]) == {*ours, "transformers fp32"}
    assert found["ratio_to_best"]["pdbus fp32"]["decode@32"] > 0
    assert found["bandwidth_bytes_per_s"] > 1e8
    assert "pdbus fp32, stack, apart ÷ best peer" in capsys.readouterr().out


def test_router_measures_real_routers(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    report = tmp_path / "router.json"
    arguments = ["router", "--routers", "2", "--streams", "1", "4", "--duration", "0.5", "--rounds", "1"]
    assert main([*arguments, "--json", str(report)]) == 0
    medians = json.loads(report.read_text())["medians"]
    assert [(row["routers"], row["streams"], row["errors"]) for row in medians] == [(2, 1, 0), (2, 4, 0)]
    assert all(row["requests_per_s"] > 0 and 0 < row["first_p50_ms"] <= row["p50_ms"] for row in medians)
    assert "req/s" in capsys.readouterr().out


INVARIANCE = ["invariance", "--requests", "4", "--longest", "70", "--rounds", "1", "--threads", "1", "--tokens", "8"]
needs_native = pytest.mark.skipif(not levels(), reason="no kernels for this processor")


@needs_native
@pytest.mark.parametrize("precision", ["fp32", "int8"])
def test_invariance_finds_every_way_equal(
    tiny: Path, tmp_path: Path, precision: str, capsys: pytest.CaptureFixture[str]
) -> None:
    report = tmp_path / "invariance.json"
    arguments = [*INVARIANCE, "--precision", precision, "--continuations", "20", "--engines", "native", "torch"]
    assert main([*arguments, "--model", str(tiny), "--json", str(report)]) == 0
    found = json.loads(report.read_text())
    assert len(found["ways"]) == 9
    assert all(way["equal"] and way["rows"] == 4 * 20 for way in found["ways"])
    assert found["ways"][4]["cached_tokens"] > 0
    assert found["fp32"]["native"]["differing"] == 0
    assert found["fp32"]["torch"]["widest_margin"] < 2e-3
    assert [cost["rows"] for cost in found["linears_us"]] == [1, 8, 512]
    assert "every bit is the same" in capsys.readouterr().out


@needs_native
def test_invariance_fails_loudly_where_one_byte_of_a_page_is_another(
    tiny: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def damaged(pages: dict[bytes, bytes]) -> dict[bytes, bytes]:
        return {key: bytes([value[0] ^ 1]) + value[1:] for key, value in pages.items()}

    monkeypatch.setattr("loadtest.invariance.ways.through_memory", damaged)
    assert main([*INVARIANCE, "--continuations", "0", "--model", str(tiny)]) == 1
    assert "NOT INVARIANT: prefix from L2" in capsys.readouterr().out


@needs_native
def test_quality_holds_every_precision_against_fp32(tiny: Path, tmp_path: Path) -> None:
    text, report = tmp_path / "text.txt", tmp_path / "quality.json"
    text.write_text("What is the capital of France? The capital of France is Paris. " * 6)
    arguments = ["quality", "--texts", str(text), "--threads", "1", "--window", "100", "--json", str(report)]
    main([*arguments, "--model", str(tiny), "--precisions", "int8", "--kv-dtypes", "int8"])
    found = json.loads(report.read_text())
    assert [(row["precision"], row["kv_dtype"]) for row in found["rows"]] == [
        ("fp32", "fp32"), ("fp32", "int8"), ("int8", "fp32"), ("int8", "int8"),
    ]  # fmt: skip
    assert found["rows"][0]["same"] == 1
    assert all(abs(row["change"]) < 0.1 and row["same"] > 0.5 for row in found["rows"])
    assert found["tokens"] == len(text.read_text())  # ids of the tiny model's tokens are bytes


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
