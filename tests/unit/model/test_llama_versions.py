"""A new version is built beside the old one: it shares what did not change and nothing else."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from pdbus.canonical import content_digest
from pdbus.errors import Corrupt
from pdbus.messages.common import Digest
from pdbus.model.build import TorchBuilder, build
from pdbus.model.checkpoint import Checkpoint, open_checkpoint
from pdbus.model.config import ModelConfig
from pdbus.model.llama import Llama
from pdbus.weights.layer import layer_of
from tests.support.checkpoints import Family, tiny_checkpoint
from tests.support.llama import Runner

Arrays = dict[str, np.ndarray]
PROMPT = [9, 30, 200, 41, 5, 77]


def opened(folder: Path, family: Family = "llama") -> tuple[Checkpoint, Arrays]:
    torch.set_num_threads(1)
    checkpoint = open_checkpoint(str(tiny_checkpoint(folder, family)))
    return checkpoint, dict(checkpoint.tensors())


def digests(tensors: Arrays) -> dict[str, Digest]:
    layers: dict[str, bytes] = {}
    for name, array in tensors.items():
        layers[layer_of(name)] = content_digest(layers.get(layer_of(name), b"") + name.encode() + array.tobytes())
    return layers


def needed_tensors(config: ModelConfig, digests: dict[str, Digest], old: Llama) -> set[str]:
    return {name for part in TorchBuilder(config, digests, old, "cpu").parts for name in part.shapes}


@pytest.mark.parametrize("family", ["llama", "mistral"], ids=["tied", "untied"])
def test_any_changed_tensor_shows_and_the_old_version_stays_as_it_was(tmp_path: Path, family: Family) -> None:
    checkpoint, tensors = opened(tmp_path, family)
    old = build(checkpoint.config, digests(tensors), tensors)
    before = Runner(old).logits(PROMPT)
    for name in tensors:
        changed = tensors | {name: tensors[name] * np.float32(1.25)}
        needed = needed_tensors(checkpoint.config, digests(changed), old)
        assert needed == {other for other in tensors if layer_of(other) == layer_of(name)}
        new = build(checkpoint.config, digests(changed), {name: changed[name] for name in needed}, reuse=old)
        fresh = build(checkpoint.config, digests(changed), changed)
        assert torch.equal(Runner(new).logits(PROMPT), Runner(fresh).logits(PROMPT)), name
        shared = [new.layers[layer] is old.layers[layer] for layer in range(2)]
        assert shared == [layer_of(name) != f"layers.{layer}" for layer in range(2)]
        assert (new.embedding is old.embedding) == (layer_of(name) != "embed")
    assert torch.equal(Runner(old).logits(PROMPT), before)


def test_nothing_is_reused_without_a_digest(tmp_path: Path) -> None:
    checkpoint, tensors = opened(tmp_path)
    old = build(checkpoint.config, {}, tensors)
    assert needed_tensors(checkpoint.config, {}, old) == set(tensors)


def test_a_version_of_another_shape_shares_only_what_is_equal(tmp_path: Path) -> None:
    checkpoint, tensors = opened(tmp_path / "a")
    old = build(checkpoint.config, digests(tensors), tensors)
    deeper = open_checkpoint(str(tiny_checkpoint(tmp_path / "b", "llama", num_hidden_layers=3, seed=1)))
    more = dict(deeper.tensors())
    new = build(deeper.config, digests(more), more, reuse=old)
    assert torch.equal(Runner(new).logits(PROMPT), Runner(build(deeper.config, {}, more)).logits(PROMPT))


@pytest.mark.parametrize(
    ("name", "wrong", "reason"),
    [
        ("model.norm.weight", None, "missing"),
        ("model.layers.1.mlp.up_proj.weight", np.zeros((96, 63), np.float32), "not float32"),
        ("model.layers.1.mlp.up_proj.weight", np.zeros((96, 64), np.float16), "not float32"),
    ],
    ids=["missing", "shape", "dtype"],
)
def test_a_wrong_tensor_is_told_by_name(tmp_path: Path, name: str, wrong: np.ndarray | None, reason: str) -> None:
    checkpoint, tensors = opened(tmp_path)
    del tensors[name]
    given = tensors if wrong is None else tensors | {name: wrong}
    with pytest.raises(Corrupt, match=reason) as caught:
        build(checkpoint.config, {}, given)
    assert name in caught.value.message


def test_a_model_owns_its_memory(tmp_path: Path) -> None:
    checkpoint, tensors = opened(tmp_path, "qwen2")
    arrays = {name: array.copy() for name, array in tensors.items()}
    model = build(checkpoint.config, {}, arrays)
    before = Runner(model).logits(PROMPT)
    for array in arrays.values():
        array.fill(0.0)
    assert torch.equal(Runner(model).logits(PROMPT), before)
