"""What a local stack consists of."""

from __future__ import annotations

import sys
from collections import Counter
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdbus import keyfile
from pdbus.grants import GRANTS
from pdbus.stack.folder import Folder
from pdbus.stack.plan import FEW_CORES, STOP_ORDER, Options, ProcessPlan, layout, processes, resolve_checkpoint
from pdbus.stack.settings import StackSettings

SERVICES = {"router", "param_server", "prefill", "decode", "cache", "invalidator"}


ENGINES = {"prefill", "decode"}


def _plans(options: Options, cores: int = 4, cores_file: str | None = None) -> list[ProcessPlan]:
    return processes(options, Folder(Path("somewhere")), "nats://127.0.0.1:1", cores, cores_file)


def test_all_six_kinds_run_each_as_its_own_module() -> None:
    plans = _plans(Options("x.gguf", "m"))
    assert {plan.service for plan in plans} == SERVICES
    assert all(plan.command == [sys.executable, "-m", f"pdbus.{plan.service}"] for plan in plans)


@given(*[st.integers(1, 4)] * 6, st.integers(1, 64))
def test_numbers_are_kept_ids_are_unique_and_engines_share_the_cores(
    routers: int, servers: int, caches: int, invalidators: int, prefill: int, decode: int, cores: int
) -> None:
    counts = {"routers": routers, "param_servers": servers, "cache_nodes": caches, "invalidators": invalidators}
    options = Options("x.gguf", "m", prefill=prefill, decode=decode, **counts)
    plans = _plans(options, cores)
    assert Counter(plan.service for plan in plans) == {
        "router": routers, "param_server": servers, "cache": caches,
        "prefill": prefill, "decode": decode, "invalidator": invalidators,
    }  # fmt: skip
    for key in ("PDBUS_ID", "PDBUS_DATA"):
        assert len({plan.settings[key] for plan in plans}) == len(plans)
    threads = [int(plan.settings["PDBUS_THREADS"]) for plan in plans if plan.service in {"prefill", "decode"}]
    assert min(threads) >= 1
    assert sum(threads) <= max(cores, len(threads))


def test_colocated_workers_read_all_prompts_and_have_the_cores_to_themselves() -> None:
    plans = _plans(Options("x.gguf", "m", prefill=3, decode=2, colocated=True))
    assert {plan.service for plan in plans} == SERVICES - {"prefill"}
    decodes = [plan for plan in plans if plan.service == "decode"]
    assert [(plan.settings["PDBUS_COLOCATED"], plan.settings["PDBUS_THREADS"]) for plan in decodes] == [("1", "2")] * 2
    assert not any("PDBUS_COLOCATED" in plan.settings for plan in _plans(Options("x.gguf", "m")))


@pytest.mark.parametrize("cores", [1, FEW_CORES, FEW_CORES + 1, 64])
def test_few_cores_are_not_divided_between_prefill_and_decode_unless_that_is_asked_for(cores: int) -> None:
    assert layout(None, False, cores) == (1, cores <= FEW_CORES)
    assert layout(None, True, cores) == (1, True)
    assert layout(3, False, cores) == (3, False)


def test_only_engines_get_the_ledger_of_cores_and_only_where_there_is_one() -> None:
    for plan in _plans(Options("x.gguf", "m"), cores_file="/ledger"):
        assert plan.settings.get("PDBUS_CORES_FILE") == ("/ledger" if plan.service in ENGINES else None)
    assert not any("PDBUS_CORES_FILE" in plan.settings for plan in _plans(Options("x.gguf", "m")))


def test_the_workers_of_a_host_share_one_cache_of_weights() -> None:
    plans = _plans(Options("x.gguf", "m", prefill=2, decode=2))
    assert len({plan.settings.get("PDBUS_WEIGHT_CACHE") for plan in plans if plan.service in ENGINES}) == 1
    assert not any("PDBUS_WEIGHT_CACHE" in plan.settings for plan in plans if plan.service not in ENGINES)


def test_libraries_make_no_more_threads_than_the_process_may_use() -> None:
    for plan in _plans(Options("x.gguf", "m", prefill=2), cores=6):
        assert plan.settings["OMP_NUM_THREADS"] == plan.settings.get("PDBUS_THREADS", "1")


def test_an_encoder_has_nothing_to_decode_and_its_prefill_workers_have_the_cores() -> None:
    for colocated in (False, True):
        options = Options("minilm", "m", decode=3, prefill=2, embeds=True, colocated=colocated)
        plans = _plans(options, cores=4)
        assert {plan.service for plan in plans} == SERVICES - {"decode"}
        assert [plan.settings["PDBUS_THREADS"] for plan in plans if plan.service == "prefill"] == ["2", "2"]


def test_only_param_servers_are_told_where_the_checkpoint_is() -> None:
    for plan in _plans(Options("x.gguf", "m")):
        assert ("PDBUS_CHECKPOINT" in plan.settings) == (plan.service == "param_server")


def test_the_first_router_takes_the_port_and_others_free_ones() -> None:
    routers = [plan for plan in _plans(Options("x", "m", port=8123, routers=3)) if plan.service == "router"]
    assert [plan.settings["PDBUS_HTTP_PORT"] for plan in routers] == ["8123", "0", "0"]


def test_every_service_has_its_place_in_the_order_of_stopping() -> None:
    assert sorted(service for group in STOP_ORDER for service in group) == sorted(SERVICES)


def test_a_path_becomes_absolute_and_a_hub_id_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "model.gguf").touch()
    assert resolve_checkpoint("model.gguf") == str(tmp_path / "model.gguf")
    assert resolve_checkpoint("someone/some-model") == "someone/some-model"


def test_precision_and_kv_dtype_are_the_engines_and_only_where_they_are_given() -> None:
    names = {"PDBUS_PRECISION", "PDBUS_KV_DTYPE"}
    assert not any(names & set(plan.settings) for plan in _plans(Options("x.gguf", "m")))
    for plan in _plans(Options("x.gguf", "m", precision="int8", kv_dtype="fp16")):
        told = {name: plan.settings[name] for name in names & set(plan.settings)}
        engine = plan.service in {"prefill", "decode"}
        assert told == ({"PDBUS_PRECISION": "int8", "PDBUS_KV_DTYPE": "fp16"} if engine else {})


def test_a_secure_stack_gives_each_process_the_key_of_its_kind_and_no_other() -> None:
    plans = _plans(Options("c", "m", secure=True))
    for each in plans:
        assert Path(each.settings["PDBUS_NATS_SEED"]).name == f"{each.service}.nk"
    assert {each.service for each in plans} <= GRANTS.keys()
    assert not any("PDBUS_NATS_SEED" in each.settings for each in _plans(Options("c", "m")))


def test_api_keys_of_the_folder_are_the_routers_where_there_are_some(tmp_path: Path) -> None:
    folder = Folder(tmp_path)
    for there in (False, True):
        if there:
            keyfile.add(folder.keys_file, "acme")
        plans = processes(Options("c", "m"), folder, "nats://127.0.0.1:1", 2)
        assert {each.service for each in plans if "PDBUS_KEYS_FILE" in each.settings} == (
            {"router"} if there else set()
        )


def test_files_that_the_environment_names_stand_before_those_of_the_folder(tmp_path: Path) -> None:
    folder = Folder(tmp_path / "data")
    folder.path.mkdir()
    keyfile.add(folder.keys_file, "acme")
    named = StackSettings(keys_file=tmp_path / "other.json", weight_cache=tmp_path / "cache")
    for each in processes(Options("c", "m"), folder, "nats://127.0.0.1:1", 2, settings=named):
        assert each.settings.get("PDBUS_KEYS_FILE") == (str(named.keys_file) if each.service == "router" else None)
        assert each.settings.get("PDBUS_WEIGHT_CACHE") == (str(named.weight_cache) if each.service in ENGINES else None)
