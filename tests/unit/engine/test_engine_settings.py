"""The environment of a worker, and what it may not hold."""

from __future__ import annotations

from pathlib import Path

import pytest

from pdbus.decode.settings import DecodeSettings
from pdbus.prefill.settings import PrefillSettings
from pdbus.runtime.cores import usable_cores
from pdbus.settings import SettingsError, load


def test_every_setting_comes_from_the_environment() -> None:
    environ = {
        "PDBUS_KV_BYTES": "1000",
        "PDBUS_THREADS": "3",
        "PDBUS_CHUNK_TOKENS": "64",
        "PDBUS_MOST_RUNNING": "5",
        "PDBUS_DEVICE": "cuda:1",
        "PDBUS_KV_DTYPE": "int8",
        "PDBUS_ENGINE": "torch",
        "PDBUS_CORES_FILE": "/ledger",
    }
    found = load(PrefillSettings, environ)
    assert (found.kv_dtype, found.engine, found.precision) == ("int8", "torch", "auto")
    assert (found.kv_bytes, found.threads, found.chunk_tokens, found.most_running) == (1000, 3, 64, 5)
    assert (found.device, found.cores_file) == ("cuda:1", Path("/ledger"))


def test_a_worker_takes_what_cores_it_may_use_unless_told() -> None:
    found = load(DecodeSettings, {})
    assert (found.threads, found.cores_file) == (usable_cores(), None)


@pytest.mark.parametrize("settings", [PrefillSettings, DecodeSettings])
@pytest.mark.parametrize(
    "environ",
    [
        {"PDBUS_KV_BYTES": "0"},
        {"PDBUS_THREADS": "0"},
        {"PDBUS_CHUNK_TOKENS": "15"},
        {"PDBUS_MOST_RUNNING": "0"},
        {"PDBUS_PRECISION": "int3"},
        {"PDBUS_PRECISION": "int8", "PDBUS_ENGINE": "torch"},
        {"PDBUS_PRECISION": "int4", "PDBUS_DEVICE": "cuda"},
        {"PDBUS_ENGINE": "native", "PDBUS_DEVICE": "cuda"},
        {"PDBUS_WEIGHT_BYTES": "40000000"},
        {"PDBUS_WEIGHT_BYTES": "40000000", "PDBUS_WEIGHT_CACHE": "weights", "PDBUS_WEIGHT_CACHE_BYTES": "0"},
        {"PDBUS_WEIGHT_CACHE_BYTES": "-1"},
    ],
    ids=str,
)
def test_a_value_that_can_not_work_is_refused_by_name(
    settings: type[PrefillSettings | DecodeSettings], environ: dict[str, str]
) -> None:
    with pytest.raises(SettingsError, match=next(iter(environ))):
        load(settings, environ)
