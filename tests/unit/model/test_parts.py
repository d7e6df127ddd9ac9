"""A version built from runs of rows and single layers is the version: nothing is missing, nothing comes twice."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from pdbus.errors import Corrupt
from pdbus.model import parts as subject
from pdbus.model.config import ModelConfig, expected_tensors, from_hf
from pdbus.model.native_build import build_native
from pdbus.model.native_llama import NativeLlama, Precision
from pdbus.model.parts import EMBEDDING, HEAD, NORM, PANEL_ROWS, parts_of
from pdbus.native.build import levels
from pdbus.native.library import NativeEngine
from pdbus.weights.blocks import blocks_of_rows

Array = np.ndarray[Any, Any]
VOCABULARY = 2500  # not a multiple of a panel


def small(*, tied: bool) -> ModelConfig:
    return from_hf(
        {
            "model_type": "llama",
            "vocab_size": VOCABULARY,
            "hidden_size": 64,
            "intermediate_size": 96,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "max_position_embeddings": 256,
            "tie_word_embeddings": tied,
        }
    )


def tensors_of(config: ModelConfig, seed: int = 0) -> dict[str, Array]:
    random = np.random.default_rng(seed)
    return {name: random.standard_normal(shape, np.float32) for name, shape in expected_tensors(config).items()}


@pytest.fixture(params=[True, False], ids=["tied", "untied"])
def config(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> ModelConfig:
    monkeypatch.setattr(subject, "_RUN_BYTES", 1)  # as short as runs can be
    return small(tied=request.param)


def test_parts_are_the_whole_model_once(config: ModelConfig) -> None:
    tensors = tensors_of(config)
    found: dict[str, list[Array]] = {}
    for part in parts_of(config, tensors):
        for name, array in part.of(tensors).items():
            found.setdefault(name, []).append(array)
    assert len(found[EMBEDDING]) > 1
    assert {name for name, arrays in found.items() if len(arrays) > 1} <= {EMBEDDING, HEAD}
    assert found.keys() == tensors.keys()
    assert all(np.array_equal(np.concatenate(found[name]), tensors[name]) for name in tensors)
    assert sum(part.nbytes for part in parts_of(config, tensors)) == sum(array.nbytes for array in tensors.values())


def test_runs_begin_with_blocks_and_panels_and_layers_come_whole(config: ModelConfig) -> None:
    shapes = expected_tensors(config)
    for part in parts_of(config, shapes):
        if part.rows is None:
            assert {name.split(".")[2] for name in part.shapes if name != NORM} <= {part.layer.removeprefix("layers.")}
        else:
            (name,) = part.shapes
            assert blocks_of_rows(shapes[name], "fp32", part.rows)
            assert part.rows.start % PANEL_ROWS == 0


def test_runs_are_of_some_megabytes_whatever_the_widths() -> None:
    for vocabulary, hidden in ((49152, 576), (151936, 896), (128256, 4096), (32000, 8192), (1000, 64), (70000, 65536)):
        runs = list(subject._runs(EMBEDDING, (vocabulary, hidden)))
        row_bytes = 4 * hidden
        assert max(part.nbytes for part in runs) <= max(subject._RUN_BYTES, 16 * max(262_144, row_bytes))
        assert sum(part.nbytes for part in runs) == vocabulary * row_bytes


def test_a_part_that_is_not_as_the_config_says_is_told_by_name(config: ModelConfig) -> None:
    tensors = tensors_of(config)
    part = next(part for part in parts_of(config, tensors) if part.layer == "layers.1")
    name = "model.layers.1.mlp.up_proj.weight"
    part.check(part.of(tensors))
    for wrong in (tensors[name][:-1], tensors[name].astype(np.float16)):
        with pytest.raises(Corrupt, match=name):
            part.check(part.of(tensors | {name: wrong}))
    del tensors[name]
    with pytest.raises(Corrupt, match=name):
        part.check(part.of(tensors))


@pytest.fixture(scope="module")
def engine() -> Any:
    if not levels():
        pytest.skip("no kernels for this processor")
    with NativeEngine(1) as made:
        yield made


def packed_bytes(model: NativeLlama) -> list[bytes]:
    linears = [one for layer in model.layers for one in (layer.qkv, layer.out, layer.gate_up, layer.down)]
    arrays = [array for one in (*linears, model.head) for array in one.arrays]
    norms = [array for layer in model.layers for array in (layer.input_norm, layer.post_norm)]
    return [b"" if one is None else one.tobytes() for one in (*arrays, *norms, model.embedding, model.final_norm)]


@pytest.mark.parametrize("precision", ["fp32", "int8-rows", "int8-groups", "int4-groups"])
def test_neither_runs_nor_an_older_version_change_a_byte(
    engine: NativeEngine, config: ModelConfig, monkeypatch: pytest.MonkeyPatch, precision: Precision
) -> None:
    tensors, other = tensors_of(config), tensors_of(config, seed=1)
    digests = {name: name.encode().ljust(32) for name in ("embed", "layers.0", "layers.1", "head")}
    older = build_native(config, digests, tensors, engine, precision)
    for changed, names in (("embed", [EMBEDDING]), ("head", [NORM, HEAD])):
        mixed = tensors | {name: other[name] for name in names if name in other}
        newer = build_native(config, digests | {changed: bytes(32)}, mixed, engine, precision, older)
        with monkeypatch.context() as patch:
            patch.setattr(subject, "_runs", whole)
            assert packed_bytes(newer) == packed_bytes(build_native(config, {}, mixed, engine, precision))
        assert newer.layers[1] is older.layers[1]


def whole(name: str, shape: tuple[int, ...], dtype: str) -> list[subject.Part]:
    return [subject.Part(subject.layer_of(name), {name: shape}, 0)]
