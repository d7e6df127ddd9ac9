"""A version made of an older one by putting changed blocks into it is, to the byte, the version made from nothing."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pdbus.model.checkpoint import open_checkpoint
from pdbus.model.config import ModelConfig
from pdbus.model.native_build import NativeBuilder, build_native
from pdbus.model.native_llama import NativeLayer, NativeLlama, Precision
from pdbus.native.build import levels
from pdbus.native.library import NativeEngine
from pdbus.native.pack import PackedLinear
from pdbus.weights import blocks as blocks_module
from pdbus.weights.changes import changed_rows
from pdbus.weights.manifest import Manifest
from tests.support.checkpoints import Family, tiny_checkpoint
from tests.support.weights import manifest_and_blocks

pytestmark = pytest.mark.skipif(not levels(), reason="no kernels for this processor")

PRECISIONS: tuple[Precision, ...] = ("fp32", "int8-groups", "int4-groups")


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of 5 rows of 64: they begin and end in the middle of a panel."""
    monkeypatch.setattr(blocks_module, "BLOCK_BYTES", 5 * 64 * 4)


def manifest_of(arrays: Mapping[str, np.ndarray]) -> Manifest:
    return manifest_and_blocks(arrays)[0]


def digests_of(manifest: Manifest) -> dict[str, bytes]:
    return {layer.name: layer.digest for layer in manifest.layers if layer.name != "meta"}


def same(ours: Any, theirs: Any) -> bool:
    if isinstance(ours, PackedLinear):
        return all(same(a, b) for a, b in zip(ours.arrays, theirs.arrays, strict=True))
    if isinstance(ours, NativeLayer):
        return all(same(getattr(ours, field.name), getattr(theirs, field.name)) for field in fields(ours))
    if isinstance(ours, np.ndarray):
        return ours.dtype == theirs.dtype and np.array_equal(ours.view(np.uint8), theirs.view(np.uint8))
    return bool(ours == theirs)


def equal(ours: NativeLlama, theirs: NativeLlama) -> bool:
    parts = ("embedding", "final_norm", "head")
    layers = zip(ours.layers, theirs.layers, strict=True)
    return all(same(getattr(ours, p), getattr(theirs, p)) for p in parts) and all(same(a, b) for a, b in layers)


def patched(
    config: ModelConfig, engine: NativeEngine, precision: Precision, old: NativeLlama, was: Manifest, now: Any
) -> tuple[NativeLlama, NativeBuilder]:
    manifest = manifest_of(now)
    builder = NativeBuilder(config, digests_of(manifest), engine, precision, old, changed_rows(was, manifest))
    for patch in builder.patches:
        builder.patch(patch, [now[run.tensor][run.rows].copy() for run in patch.runs])
    for part in builder.parts:
        builder.add(part, part.of(now))
    return builder.finish(), builder


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize(("family", "tied"), [("llama", True), ("qwen2", False), ("qwen3", False)])
def test_patched_is_fresh(tmp_path: Path, precision: Precision, family: Family, tied: bool) -> None:
    checkpoint = open_checkpoint(tiny_checkpoint(tmp_path, family, tie_word_embeddings=tied, num_hidden_layers=1))
    config, tensors = checkpoint.config, dict(checkpoint.tensors())
    was = manifest_of(tensors)
    random = np.random.default_rng(0)
    with NativeEngine(1) as engine:
        old = build_native(config, digests_of(was), tensors, engine, precision)
        for name, array in tensors.items():  # one tensor after the other, a few rows of it
            rows = random.integers(0, len(array), 3)
            now = dict(tensors)
            now[name] = array.copy()
            now[name][rows] = array[rows] * np.float32(1.5) + np.float32(0.25)
            made, builder = patched(config, engine, precision, old, was, now)
            assert equal(made, build_native(config, digests_of(manifest_of(now)), now, engine, precision)), name
            assert not builder.parts or name == "model.norm.weight"  # alone in its layer
            changed = sum(patch.nbytes for patch in builder.patches)
            assert changed <= max(4 * 3 * 5 * array[0].size, array.nbytes if array.ndim == 1 else 0)


@pytest.mark.parametrize("precision", PRECISIONS)
def test_many_changes_at_once_and_what_did_not_change_is_shared(tmp_path: Path, precision: Precision) -> None:
    checkpoint = open_checkpoint(tiny_checkpoint(tmp_path, "llama"))
    config, tensors = checkpoint.config, dict(checkpoint.tensors())
    was = manifest_of(tensors)
    now = {name: array.copy() for name, array in tensors.items()}
    down = "model.layers.1.mlp.down_proj.weight"
    for name in ("model.embed_tokens.weight", "model.layers.0.self_attn.k_proj.weight", down):
        now[name][3:17] *= np.float32(2)
    with NativeEngine(1) as engine:
        old = build_native(config, digests_of(was), tensors, engine, precision)
        made, _ = patched(config, engine, precision, old, was, now)
        assert equal(made, build_native(config, digests_of(manifest_of(now)), now, engine, precision))
        assert equal(old, build_native(config, digests_of(was), tensors, engine, precision))  # it was left as it is
        assert made.layers[1].qkv is old.layers[1].qkv
        assert made.layers[1].down is not old.layers[1].down


def test_a_layer_of_which_most_changed_is_made_anew(tmp_path: Path) -> None:
    checkpoint = open_checkpoint(tiny_checkpoint(tmp_path, "llama"))
    tensors = dict(checkpoint.tensors())
    now = {name: array * 2 if "layers.0" in name else array for name, array in tensors.items()}
    now["model.layers.1.mlp.up_proj.weight"] = now["model.layers.1.mlp.up_proj.weight"] * 2
    assert [*changed_rows(manifest_of(tensors), manifest_of(now))] == ["layers.1"]
