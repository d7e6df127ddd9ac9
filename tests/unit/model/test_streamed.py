"""A model that is read from files as it computes gives the numbers of one that is in memory, and takes no more than its
budget."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pdbus.caching.cache_folder import CacheFolder
from pdbus.model import parts as parts_module
from pdbus.model.backend import Backend
from pdbus.model.backends import BackendOptions, open_backend
from pdbus.model.batch import Batch, SequenceSlice
from pdbus.model.checkpoint import Checkpoint, open_checkpoint
from pdbus.native.build import levels
from pdbus.settings import SettingsError
from pdbus.weights import blocks as blocks_module
from pdbus.weights.changes import changed_rows
from tests.support.checkpoints import Family, tiny_checkpoint
from tests.support.weights import manifest_and_blocks

native = pytest.mark.skipif(not levels(), reason="no kernels for this processor")
ENGINES = [
    pytest.param(BackendOptions("native", precision), marks=native, id=precision)
    for precision in ("int8", "int4", "fp32")
] + [pytest.param(BackendOptions("torch"), id="torch")]  # fmt: skip
PROMPT = [5, 300, 7, 120, 9, 33, 250, 11, 64, 2]


@pytest.fixture(autouse=True)
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks of 16 rows of 64, and embedding and head in pieces of 4 blocks."""
    monkeypatch.setattr(blocks_module, "BLOCK_BYTES", 16 * 64 * 4)
    monkeypatch.setattr(parts_module, "_RUN_BYTES", 64 * 64 * 4)


@pytest.fixture
def folder(tmp_path: Path) -> CacheFolder:
    return CacheFolder(tmp_path / "cache", 1 << 30)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    return open_checkpoint(tiny_checkpoint(tmp_path_factory.mktemp("streamed"), "llama", num_hidden_layers=5))


def version(backend: Backend, checkpoint: Checkpoint, tensors: Any, old: Any = None, was: Any = None) -> Any:
    manifest, _ = manifest_and_blocks(tensors)
    digests = {layer.name: layer.digest for layer in manifest.layers if layer.name != "meta"}
    changes = changed_rows(manifest_and_blocks(was)[0], manifest) if was else {}
    builder = backend.begin(checkpoint.config, digests, old, changes, manifest.tensors)
    for patch in builder.patches:
        builder.patch(patch, [tensors[run.tensor][run.rows].copy() for run in patch.runs])
    for part in builder.parts:
        builder.add(part, part.of(tensors))
    return builder.finish(), builder


def logits(backend: Backend, model: Any) -> np.ndarray:
    """Of a prompt in two chunks, the rows of the second one wanted, and of one token after it."""
    pool = backend.pool(backend.page_format(model.config), 4)
    steps = ((PROMPT[:6], 0, [5]), (PROMPT[6:], 6, [0, 2, 3]), ([17], 10, [0]))
    rows = [
        model.forward(Batch(tokens, [SequenceSlice(0, len(tokens), past, [2, 0, 1])], wanted), pool)
        for tokens, past, wanted in steps
    ]
    return np.concatenate(rows)


@pytest.fixture
def backends() -> Iterator[Any]:
    opened: list[Backend] = []

    def make(options: BackendOptions, checkpoint: Checkpoint) -> Backend:
        opened.append(open_backend(options, checkpoint.config))
        return opened[-1]

    yield make
    for backend in opened:
        backend.close()


def least(backends: Any, options: BackendOptions, checkpoint: Checkpoint, folder: CacheFolder) -> int:
    """As the refusal says."""
    backend = backends(replace(options, folder=folder, weight_bytes=1), checkpoint)
    with pytest.raises(SettingsError, match="needs at least") as refused:
        version(backend, checkpoint, dict(checkpoint.tensors()))
    return int(str(refused.value).split("at least ")[1].split(":")[0])


@pytest.mark.parametrize("options", ENGINES)
def test_streamed_is_resident(
    options: BackendOptions, checkpoint: Checkpoint, folder: CacheFolder, backends: Any
) -> None:
    tensors = dict(checkpoint.tensors())
    resident = backends(options, checkpoint)
    whole, _ = version(resident, checkpoint, tensors)
    expected = logits(resident, whole)
    smallest = least(backends, options, checkpoint, folder)
    for budget in (smallest, 2 * smallest, 1 << 30):
        backend = backends(replace(options, folder=folder, weight_bytes=budget), checkpoint)
        model, builder = version(backend, checkpoint, tensors)
        assert not builder.parts  # all of it was made before
        ours = logits(backend, model)
        if options.engine == "native":
            assert np.array_equal(ours.view(np.uint32), expected.view(np.uint32))
        else:
            np.testing.assert_allclose(ours, expected, atol=1e-4)


@pytest.mark.parametrize("options", ENGINES)
def test_a_newer_version_shares_pieces_and_is_as_one_made_from_nothing(
    options: BackendOptions, checkpoint: Checkpoint, folder: CacheFolder, backends: Any
) -> None:
    tensors = dict(checkpoint.tensors())
    now = {name: array.copy() for name, array in tensors.items()}
    for name in ("model.embed_tokens.weight", "model.layers.1.mlp.up_proj.weight", "model.layers.3.mlp.up_proj.weight"):
        now[name][20:23] += np.float32(0.5)
    resident = backends(options, checkpoint)
    expected = logits(resident, version(resident, checkpoint, now)[0])
    backend = backends(replace(options, folder=folder, weight_bytes=1 << 20), checkpoint)
    old, _ = version(backend, checkpoint, tensors)
    before = logits(backend, old)
    new, builder = version(backend, checkpoint, now, old, tensors)
    asked = {name for part in builder.parts for name in part.shapes} | {
        r.tensor for p in builder.patches for r in p.runs
    }
    assert not [name for name in asked if "layers.0" in name or "layers.2" in name]
    assert new.pieces.layers[2] is old.pieces.layers[2]
    assert new.pieces.embedding[1] is old.pieces.embedding[1]
    np.testing.assert_allclose(logits(backend, new), expected, atol=1e-4 if options.engine == "torch" else 0)
    assert np.array_equal(logits(backend, old), before)


@native
def test_what_stays_in_memory_is_within_the_budget(
    checkpoint: Checkpoint, folder: CacheFolder, backends: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = BackendOptions("native", "int8")
    smallest = least(backends, options, checkpoint, folder)
    budget = smallest + smallest // 2
    backend = backends(replace(options, folder=folder, weight_bytes=budget), checkpoint)
    model, _ = version(backend, checkpoint, dict(checkpoint.tensors()))
    residency = model._residency
    touched: set[Any] = set()
    most = 0
    passed, comes = residency.passed, residency.comes

    def note_passed(piece: Any) -> None:
        passed(piece)
        if piece.mapped not in residency._kept:
            touched.discard(piece.mapped)

    def note_comes(piece: Any) -> None:
        nonlocal most
        comes(piece)
        touched.add(piece.mapped)
        most = max(most, sum(one.nbytes for one in touched | residency._kept))

    monkeypatch.setattr(residency, "passed", note_passed)
    monkeypatch.setattr(residency, "comes", note_comes)
    logits(backend, model)
    assert 0 < residency.kept_bytes < budget
    assert most <= budget * 1.02  # headers of files count here
    assert touched <= residency._kept


@native
def test_a_damaged_file_is_made_anew(checkpoint: Checkpoint, folder: CacheFolder, backends: Any) -> None:
    options = BackendOptions("native", "int8", folder=folder, weight_bytes=1 << 20)
    tensors = dict(checkpoint.tensors())
    backend = backends(options, checkpoint)
    expected = logits(backend, version(backend, checkpoint, tensors)[0])
    files = sorted(folder.path.glob("packed/*/*"))
    damaged = bytearray(files[0].read_bytes())
    damaged[-100] ^= 1
    files[0].write_bytes(damaged)
    files[1].write_bytes(b"")
    files[2].unlink()
    other = backends(options, checkpoint)
    model, builder = version(other, checkpoint, tensors)
    assert builder.parts
    assert np.array_equal(logits(other, model), expected)


@native
@pytest.mark.parametrize("family", ["qwen2", "qwen3", "mistral"])
def test_every_family_can_be_streamed(tmp_path: Path, family: Family, folder: CacheFolder, backends: Any) -> None:
    checkpoint = open_checkpoint(tiny_checkpoint(tmp_path, family))
    for options in (BackendOptions("native", "int8"), BackendOptions("torch")):
        resident = backends(options, checkpoint)
        expected = logits(resident, version(resident, checkpoint, dict(checkpoint.tensors()))[0])
        backend = backends(replace(options, folder=folder, weight_bytes=1 << 19), checkpoint)
        model, _ = version(backend, checkpoint, dict(checkpoint.tensors()))
        np.testing.assert_allclose(logits(backend, model), expected, atol=1e-4 if options.engine == "torch" else 0)


@native
@pytest.mark.parametrize("precision", ["int8", "int4", "fp32"])
def test_a_resident_worker_takes_what_another_has_packed(
    precision: Any, checkpoint: Checkpoint, folder: CacheFolder, backends: Any
) -> None:
    tensors = dict(checkpoint.tensors())
    options = BackendOptions("native", precision, folder=folder)
    first, second = (backends(options, checkpoint) for _ in range(2))
    model, builder = version(first, checkpoint, tensors)
    assert builder.parts
    twin, builder = version(second, checkpoint, tensors)
    assert [part.layer for part in builder.parts] == ["head"]  # the last norm
    expected = logits(first, model)
    assert np.array_equal(logits(second, twin), expected)
    streaming = backends(replace(options, weight_bytes=1 << 20), checkpoint)
    streamed, builder = version(streaming, checkpoint, tensors)
    assert [part.layer for part in builder.parts] == ["head"]
    assert np.array_equal(logits(streaming, streamed), expected)
