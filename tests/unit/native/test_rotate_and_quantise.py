"""Rotated models compute the same function; quantised tensors come back as near as their bits allow."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from pdbus.model.checkpoint import open_checkpoint
from pdbus.model.hadamard import rotate
from pdbus.model.native_build import build_native
from pdbus.model.quantize import Groups4, Groups8, groups4, groups8, rows8, widened
from pdbus.model.rotate import rotated, rotated_names
from pdbus.native.library import NativeEngine
from pdbus.native.pack import pack_f32
from tests.support.checkpoints import FAMILIES, Family, tiny_checkpoint
from tests.support.llama import Runner, load
from tests.unit.native.test_native_llama import Native, prompt


@pytest.mark.parametrize("size", [16, 64, 96, 576, 896, 960, 1536, 14 * 32])
def test_rotation_is_orthogonal(size: int) -> None:
    matrix = rotate(np.eye(size))
    assert np.allclose(matrix @ matrix.T, np.eye(size), atol=1e-12)


@pytest.mark.parametrize("size", [64, 576, 896, 960, 1536])
def test_rotation_spreads_one_value_evenly_over_all(size: int) -> None:
    assert np.allclose(np.abs(rotate(np.eye(size))), 1 / np.sqrt(size))


@pytest.mark.parametrize("family", FAMILIES)
def test_a_rotated_fp32_model_gives_the_same_logits(
    engine: NativeEngine, tmp_path_factory: pytest.TempPathFactory, family: Family, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.set_num_threads(1)
    checkpoint = open_checkpoint(str(tiny_checkpoint(tmp_path_factory.mktemp("model"), family, attention_bias=True)))
    exact = lambda weight, bias, precision, head=False: pack_f32(weight, bias)  # noqa: E731
    monkeypatch.setattr("pdbus.model.native_layer.packed", exact)
    model = build_native(checkpoint.config, {}, dict(checkpoint.tensors()), engine, "int8-rows")
    wanted = Runner(load(checkpoint)).logits(prompt(80)).numpy()
    assert np.abs(Native(model).logits(prompt(80)) - wanted).mean() < 2e-3  # the embedding is kept in fp16


def test_a_changed_tensor_changes_only_itself(tmp_path_factory: pytest.TempPathFactory) -> None:
    checkpoint = open_checkpoint(str(tiny_checkpoint(tmp_path_factory.mktemp("model"), "llama")))
    tensors = dict(checkpoint.tensors())
    names = rotated_names(checkpoint.config)
    before = {key: rotated(checkpoint.config, key, tensors) for key in names}
    name = "model.layers.1.mlp.down_proj.weight"
    changed = {**tensors, name: tensors[name] * np.float32(1.5)}
    after = {key: rotated(checkpoint.config, key, changed) for key in names}
    assert [key for key in before if not np.array_equal(before[key], after[key])] == [name]


def test_groups_give_back_what_a_gguf_file_holds() -> None:
    random = np.random.default_rng(0)
    codes = random.integers(0, 16, (8, 64)).astype(np.uint8)
    codes[:, ::32], codes[:, 1::32] = 0, 15
    fours = Groups4(codes, *random.uniform(0.01, 0.1, (2, 8, 2)).astype(np.float16))
    assert all(np.array_equal(ours, theirs) for ours, theirs in zip(groups4(widened(fours)), fours, strict=True))
    whole = random.integers(-126, 127, (8, 64)).astype(np.int8)
    whole[:, ::32] = -127
    eights = Groups8(whole, random.uniform(0.01, 0.1, (8, 2)).astype(np.float16))
    assert all(np.array_equal(ours, theirs) for ours, theirs in zip(groups8(widened(eights)), eights, strict=True))


def test_errors_are_at_most_half_a_step() -> None:
    weight = np.random.default_rng(1).standard_normal((16, 96)).astype(np.float32)
    assert (np.abs(widened(rows8(weight)) - weight) <= rows8(weight).scale[:, None] * 0.501).all()
    step = groups8(weight).scale.repeat(32, 1).astype(np.float32)
    assert (np.abs(widened(groups8(weight)) - weight) <= step * 0.6).all()
    assert (np.abs(widened(groups4(weight)) - weight) <= groups4(weight).scale.repeat(32, 1) * 0.6).all()


def test_a_constant_or_zero_tensor_stays_itself() -> None:
    for value in (0.0, 0.25, -3.0):
        weight = np.full((4, 64), value, np.float32)
        for quantised in (rows8(weight), groups4(weight), groups8(weight)):
            assert np.allclose(widened(quantised), weight, rtol=1e-3)
