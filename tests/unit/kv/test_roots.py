"""The KV-relevant root, proved on real numbers: it changes for exactly those tensors that keys and values depend on."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pdbus.canonical import content_digest
from pdbus.kv.format import PAGE_TOKENS, PageFormat, StreamFormat
from pdbus.kv.pool import KvPool
from pdbus.kv.prefix import LayerGroup
from pdbus.kv.roots import is_kv_relevant, kv_relevant_root, stream_root
from pdbus.model.backend import Backend
from pdbus.model.backends import BackendOptions, open_backend
from pdbus.model.batch import Batch, SequenceSlice
from pdbus.model.checkpoint import Checkpoint, open_checkpoint
from pdbus.model.config import ModelConfig
from pdbus.model.rope_config import RopeScaling
from pdbus.model.scope import prefix_scope
from pdbus.native.build import levels
from tests.support.checkpoints import FAMILIES, Family, tiny_checkpoint

TOKENS = [7, 300, 21, 4, 4, 250, 19, 88, 3, 61] * 3
"""Two pages."""
WHOLE = LayerGroup(0, 1)
AFTER_KV = {
    *(
        f"self_attn.{name}"
        for name in ("q_proj.weight", "q_proj.bias", "q_norm.weight", "o_proj.weight", "o_proj.bias")
    ),
    *(f"mlp.{name}_proj.{kind}" for name in ("gate", "up", "down") for kind in ("weight", "bias")),
    "post_attention_layernorm.weight",
}
"""DESIGN.md's own list, of the last layer."""
MODELS: dict[str, tuple[Family, dict[str, Any]]] = {
    "smollm-tied": ("llama", {"tie_word_embeddings": True}),
    "smollm-untied": ("llama", {"tie_word_embeddings": False}),
    "llama-biases": ("llama", {"attention_bias": True, "mlp_bias": True}),
    "llama-3-rope": ("llama", {"rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 5e5}}),
    "mistral": ("mistral", {"sliding_window": 8}),
    "qwen2": ("qwen2", {}),
    "qwen3": ("qwen3", {"tie_word_embeddings": False}),
    "qwen3-tied": ("qwen3", {"tie_word_embeddings": True, "attention_bias": True}),
}
needs_native = pytest.mark.skipif(not levels(), reason="no kernels for this processor")
ENGINES = {
    "torch": BackendOptions("torch", "fp32", "fp32"),
    "native-fp32": BackendOptions("native", "fp32", "fp32"),
    "native-int8": BackendOptions("native", "int8", "int8"),
}


@pytest.fixture(
    scope="module", params=["torch", *(pytest.param(f"native-{p}", marks=needs_native) for p in ("fp32", "int8"))]
)
def backend(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Backend]:
    config = open_checkpoint(tiny_checkpoint(tmp_path_factory.mktemp("any"), "llama")).config
    made = open_backend(ENGINES[request.param], config)
    yield made
    made.close()


def kv_bytes(backend: Backend, config: ModelConfig, tensors: dict[str, np.ndarray]) -> list[bytes]:
    """K and V of TOKENS, by layer."""
    model = backend.build(config, {}, tensors, None)
    pool = backend.pool(backend.page_format(config), 2)
    pool.write_bytes(slice(None), (0, 1), bytes(2 * pool.format.page_bytes))
    model.forward(Batch(TOKENS, [SequenceSlice(0, len(TOKENS), 0, [1, 0])], []), pool)
    return [bytes(pool.read_bytes(slice(layer, layer + 1), (1, 0))) for layer in range(config.layers)]


def digests(tensors: dict[str, np.ndarray]) -> dict[str, bytes]:
    return {name: content_digest(array.tobytes()) for name, array in tensors.items()}


def opened(folder: Path, name: str) -> tuple[Checkpoint, dict[str, np.ndarray]]:
    family, options = MODELS[name]
    checkpoint = open_checkpoint(str(tiny_checkpoint(folder, family, **options)))
    return checkpoint, dict(checkpoint.tensors())


@pytest.mark.parametrize("name", MODELS)
def test_it_covers_exactly_what_kv_depends_on(tmp_path: Path, name: str, backend: Backend) -> None:
    """For every tensor and every group of layers from the first on: KV changes if and only if the root does."""
    checkpoint, tensors = opened(tmp_path, name)
    kv, groups = kv_bytes(backend, checkpoint.config, tensors), [LayerGroup(0, 0), WHOLE]
    for tensor, array in tensors.items():
        # Scaled along the rows: no softmax, norm or sign symmetry can hide that.
        factors = np.linspace(1.1, 1.5, len(array), dtype=np.float32).reshape(-1, *[1] * (array.ndim - 1))
        changed = tensors | {tensor: array * factors}
        new_kv = kv_bytes(backend, checkpoint.config, changed)
        for group in groups:
            kv_same = new_kv[: group.last + 1] == kv[: group.last + 1]
            root_same = kv_relevant_root(digests(changed), group) == kv_relevant_root(digests(tensors), group)
            told = f"{tensor}, layers 0 to {group.last}: KV {'same' if kv_same else 'differs'}, root does not say so"
            assert root_same == kv_same, told


def below_layer_1(backend: Backend, config: ModelConfig, tensors: dict[str, np.ndarray]) -> list[bytes]:
    """K and V of TOKENS in layer 0, and what enters layer 1."""
    model = backend.build(config, {}, tensors, None)
    pool = backend.pool(backend.page_format(config), 2, StreamFormat((1,), config.hidden_size))
    pool.write_bytes(slice(None), (0, 1), bytes(2 * pool.format.page_bytes))
    model.forward(Batch(TOKENS, [SequenceSlice(0, len(TOKENS), 0, [1, 0])], []), pool)
    kept = pool._streams[1].numpy() if isinstance(pool, KvPool) else pool._kept[0]  # type: ignore[attr-defined]
    stream = kept.reshape(2, PAGE_TOKENS, config.hidden_size)[[1, 0]].reshape(-1, config.hidden_size)
    return [bytes(pool.read_bytes(slice(0, 1), (1, 0))), stream[: len(TOKENS)].tobytes()]


@pytest.mark.parametrize("name", MODELS)
def test_the_root_of_a_stream_covers_exactly_what_enters_the_layer_and_is_below(
    tmp_path: Path, name: str, backend: Backend
) -> None:
    checkpoint, tensors = opened(tmp_path, name)
    before, root = below_layer_1(backend, checkpoint.config, tensors), stream_root(digests(tensors), 1)
    for tensor, array in tensors.items():
        factors = np.linspace(1.1, 1.5, len(array), dtype=np.float32).reshape(-1, *[1] * (array.ndim - 1))
        changed = tensors | {tensor: array * factors}
        same = below_layer_1(backend, checkpoint.config, changed) == before
        assert (stream_root(digests(changed), 1) == root) == same, tensor
    other_layer = {name.replace("layers.1", "layers.2"): content for name, content in digests(tensors).items()}
    assert stream_root(digests(tensors) | other_layer, 2) != root


SETTINGS: dict[str, dict[str, Any]] = {
    "rope_theta": {"rope_theta": 20_000.0},
    "rope_scaling": {"rope_scaling": RopeScaling("linear", 4.0)},
    "rope_scaling_llama3": {"rope_scaling": RopeScaling("llama3", 8.0, original_max_positions=16)},
    "rms_norm_eps": {"rms_norm_eps": 1e-2},
    "window": {"sliding_window": 4, "windowed_layers": (True, False)},
}


@pytest.mark.parametrize("setting", SETTINGS)
def test_settings_that_kv_depends_on_are_in_the_scope(tmp_path: Path, setting: str, backend: Backend) -> None:
    checkpoint, tensors = opened(tmp_path, "smollm-tied")
    assert isinstance(checkpoint.config, ModelConfig)
    other = dataclasses.replace(checkpoint.config, **SETTINGS[setting])
    assert kv_bytes(backend, other, tensors) != kv_bytes(backend, checkpoint.config, tensors)
    scopes = [prefix_scope(one, digests(tensors), PageFormat(2, 2, 16), "class") for one in (other, checkpoint.config)]
    assert scopes[0].digest() != scopes[1].digest()
    assert scopes[0].kv_root == scopes[1].kv_root


def test_every_setting_is_in_the_scope(tmp_path: Path) -> None:
    checkpoint, tensors = opened(tmp_path, "smollm-tied")
    config = dataclasses.asdict(checkpoint.config)
    scope = prefix_scope(checkpoint.config, digests(tensors), PageFormat(2, 2, 16), "class")
    assert set(dict(scope.settings)) == set(config)


@pytest.mark.parametrize("family", FAMILIES)
def test_it_leaves_out_what_the_design_lists(tmp_path: Path, family: Family) -> None:
    options = {"attention_bias": True, "mlp_bias": True} if family == "llama" else {}
    names = dict(open_checkpoint(str(tiny_checkpoint(tmp_path, family, **options))).tensors()).keys()
    left_out = {name for name in names if not is_kv_relevant(name, WHOLE)}
    listed = {f"model.layers.1.{name}" for name in AFTER_KV} | {"model.norm.weight", "lm_head.weight"}
    assert left_out == listed & names


def test_an_unknown_tensor_counts_and_meta_does_not() -> None:
    digests = {"model.layers.1.self_attn.k_proj.weight": b"k"}
    plain = kv_relevant_root(digests, WHOLE)
    assert kv_relevant_root(digests | {"model.layers.1.self_attn.new_kind.weight": b"n"}, WHOLE) != plain
    assert kv_relevant_root(digests | {"model.embed_norm.weight": b"n"}, WHOLE) != plain
    assert kv_relevant_root(digests | {"meta/chat_template.jinja": b"n"}, WHOLE) == plain


def test_groups_have_roots_of_their_own() -> None:
    digests = {f"model.layers.{layer}.self_attn.k_proj.weight": b"k" for layer in range(12)}
    groups = [LayerGroup(0, 1), LayerGroup(1, 1), LayerGroup(0, 11), LayerGroup(0, 10)]
    assert len({kv_relevant_root(digests, group) for group in groups}) == 4


def test_swapped_tensors_differ() -> None:
    left = {"model.layers.1.self_attn.k_proj.weight": b"a", "model.layers.1.self_attn.v_proj.weight": b"b"}
    right = {"model.layers.1.self_attn.k_proj.weight": b"b", "model.layers.1.self_attn.v_proj.weight": b"a"}
    assert kv_relevant_root(left, WHOLE) != kv_relevant_root(right, WHOLE)


def test_a_root_over_nothing_is_refused() -> None:
    with pytest.raises(ValueError, match="no tensor of layer 1"):
        kv_relevant_root({"model.embed_tokens.weight": b"e"}, WHOLE)
