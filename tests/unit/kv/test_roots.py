"""The KV-relevant root, proved on real numbers: it changes for exactly those tensors that keys and values depend on."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from pdbus.canonical import content_digest
from pdbus.kv.codec import export_layer
from pdbus.kv.pool import KvPool
from pdbus.kv.prefix import LayerGroup
from pdbus.kv.roots import is_kv_relevant, kv_relevant_root
from pdbus.model.batch import Batch, SequenceSlice
from pdbus.model.build import build
from pdbus.model.checkpoint import open_checkpoint
from pdbus.model.config import ModelConfig
from tests.support.checkpoints import FAMILIES, Family, tiny_checkpoint

TOKENS = [7, 300, 21, 4, 4, 250, 19, 88, 3, 61]
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


def kv_bytes(config: ModelConfig, tensors: dict[str, np.ndarray], layers: int) -> bytes:
    """K and V of TOKENS in the first `layers` layers."""
    model = build(config, {}, tensors)
    pool = KvPool(model.page_format(), 1)
    for layer in range(config.layers):
        pool.layer(layer).zero_()
    model.forward(Batch(TOKENS, [SequenceSlice(0, len(TOKENS), 0, [0])], []), pool)
    return b"".join(export_layer(pool, layer, [0]) for layer in range(layers))


def root(tensors: dict[str, np.ndarray], group: LayerGroup) -> bytes:
    return kv_relevant_root({name: content_digest(array.tobytes()) for name, array in tensors.items()}, group)


@pytest.mark.parametrize("last", [0, 1], ids=lambda last: f"layers-0-to-{last}")
@pytest.mark.parametrize(
    ("family", "options"),
    [
        ("llama", {"attention_bias": True, "mlp_bias": True, "tie_word_embeddings": False}),
        ("qwen2", {}),
        ("qwen3", {"tie_word_embeddings": False}),
    ],
    ids=["llama", "qwen2", "qwen3"],
)
def test_it_covers_exactly_what_kv_depends_on(
    tmp_path: Path, family: Family, options: dict[str, object], last: int
) -> None:
    torch.set_num_threads(1)
    checkpoint = open_checkpoint(str(tiny_checkpoint(tmp_path, family, **options)))
    tensors, group = dict(checkpoint.tensors()), LayerGroup(0, last)
    kv, whole = kv_bytes(checkpoint.config, tensors, last + 1), root(tensors, group)
    for name, array in tensors.items():
        # Scaled along the rows: no softmax, norm or sign symmetry can hide that.
        changed = tensors | {
            name: array * np.linspace(1.1, 1.5, len(array), dtype=np.float32).reshape(-1, *[1] * (array.ndim - 1))
        }
        kv_same = kv_bytes(checkpoint.config, changed, last + 1) == kv
        root_same = root(changed, group) == whole
        assert root_same == kv_same, f"{name}: KV {'same' if kv_same else 'differs'}, root does not say so"


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
