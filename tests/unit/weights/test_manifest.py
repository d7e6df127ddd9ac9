from __future__ import annotations

import hashlib
import random

import msgpack
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdbus.errors import Corrupt, NotFound
from pdbus.weights.blocks import cut
from pdbus.weights.layer import Layer, Tensor, layer_of, meta_tensor
from pdbus.weights.manifest import Manifest, root_layers


def tensor(name: str, array: np.ndarray) -> Tensor:
    dtype = "u8" if array.dtype == np.uint8 else "fp32"
    return Tensor(name, dtype, array.shape, tuple(hashlib.sha256(block).digest() for block in cut(array)))


def some_tensors(scale: float = 1.0) -> list[Tensor]:
    arrays = {
        "model.embed_tokens.weight": np.arange(300_000).reshape(300, 1000),
        "model.layers.0.self_attn.q_proj.weight": np.ones((8, 8)),
        "model.layers.0.input_layernorm.weight": np.ones(8),
        "model.layers.10.input_layernorm.weight": np.ones(8) * scale,
        "model.layers.2.input_layernorm.weight": np.ones(8),
        "model.norm.weight": np.zeros(8),
        "lm_head.weight": np.ones((2, 8)),
    }
    files = {"config.json": b"{}", "tokenizer.json": b"x" * 300_000, "empty": b""}
    meta = [tensor(meta_tensor(name), np.frombuffer(content, np.uint8)) for name, content in files.items()]
    return [tensor(name, array.astype(np.float32)) for name, array in arrays.items()] + meta


def whole(manifest: Manifest) -> Manifest:
    return Manifest.assemble(manifest.encoded, {layer.digest: layer.encoded for layer in manifest.layers})


def test_layers_of_checkpoint_names() -> None:
    assert layer_of("model.layers.17.mlp.up_proj.weight") == "layers.17"
    assert layer_of("encoder.layer.3.output.dense.bias") == "layers.3"
    assert layer_of("model.embed_tokens.weight") == "embed"
    assert layer_of("model.norm.weight") == "head"
    assert layer_of("lm_head.weight") == "head"
    assert layer_of(meta_tensor("tokenizer.json")) == "meta"


def test_the_root_does_not_depend_on_the_order_of_tensors() -> None:
    tensors = some_tensors()
    root = Manifest.build(tensors).root
    for seed in range(5):
        random.Random(seed).shuffle(tensors)
        assert Manifest.build(tensors).root == root


def test_the_root_is_a_golden_value() -> None:
    assert (
        Manifest.build(some_tensors()).root.hex() == "77784f467697e63f23c63cc2e10d03bc78dbf96019907512cc65f4943249f242"
    )


def test_layers_come_in_their_order_of_computation() -> None:
    names = [layer.name for layer in Manifest.build(some_tensors()).layers]
    assert names == ["embed", "layers.0", "layers.2", "layers.10", "head", "meta"]


def test_a_manifest_is_read_back_from_its_blocks() -> None:
    manifest = Manifest.build(some_tensors())
    assert whole(manifest) == manifest
    assert whole(manifest).root == manifest.root == hashlib.sha256(manifest.encoded).digest()
    assert manifest.files == ("config.json", "empty", "tokenizer.json")
    contents = list(manifest.manifests())
    listed = list(manifest.blocks())
    assert [hashlib.sha256(content).digest() for content in contents] == [b.digest for b in listed[: len(contents)]]
    assert sum(b.size for b in listed[len(contents) :]) == sum(t.nbytes for t in manifest.tensors.values())


def test_a_change_of_one_tensor_changes_its_layer_and_the_root_only() -> None:
    before, after = Manifest.build(some_tensors()), Manifest.build(some_tensors(scale=2.0))
    assert before.root != after.root
    changed = {new.name for old, new in zip(before.layers, after.layers, strict=True) if old.digest != new.digest}
    assert changed == {"layers.10"}
    same = "model.layers.2.input_layernorm.weight"
    assert before.tensor(same).digest == after.tensor(same).digest


def test_equal_content_has_one_tensor_digest_and_another_shape_another_one() -> None:
    flat, square = np.ones(64, np.float32), np.ones((8, 8), np.float32)
    assert tensor("a", flat).digest == tensor("b", flat).digest
    assert tensor("a", flat).digest != tensor("a", square).digest


def test_an_unknown_tensor_and_one_given_twice_are_told() -> None:
    manifest = Manifest.build(some_tensors())
    with pytest.raises(NotFound, match="no tensor nope"):
        manifest.tensor("nope")
    with pytest.raises(ValueError, match="twice"):
        Manifest.build([*some_tensors(), some_tensors()[0]])


@given(st.binary(max_size=80))
def test_garbage_is_corrupt_as_layer_and_as_root(content: bytes) -> None:
    with pytest.raises(Corrupt):
        Layer.decode(content)
    with pytest.raises(Corrupt):
        root_layers(content)


@pytest.mark.parametrize(
    "change",
    [
        lambda rows: rows[0].__setitem__(1, "fp64"),
        lambda rows: rows[0].__setitem__(2, [-1]),
        lambda rows: rows[0].__setitem__(2, [True]),
        lambda rows: rows[0][3].append(bytes(32)),
        lambda rows: rows[0][3].__setitem__(0, bytes(31)),
        lambda rows: rows.reverse(),
        lambda rows: rows.append(rows[-1]),
        lambda rows: rows[0].__setitem__(0, "model.layers.1.x"),
        lambda rows: rows.append("x"),
    ],
)
def test_a_malformed_layer_manifest_is_corrupt(change: object) -> None:
    layer = Manifest.build(some_tensors()).layers[1]
    kind, name, rows = msgpack.unpackb(layer.encoded)
    change(rows)  # type: ignore[operator]
    with pytest.raises(Corrupt):
        Layer.decode(msgpack.packb([kind, name, rows]))


def test_a_manifest_that_is_not_in_the_shortest_form_is_corrupt() -> None:
    manifest = Manifest.build(some_tensors())
    longer = manifest.encoded.replace(b"\xa4meta", b"\xd9\x04meta")
    assert msgpack.unpackb(longer) == msgpack.unpackb(manifest.encoded)
    with pytest.raises(Corrupt, match="canonical"):
        root_layers(longer)


def test_layers_out_of_order_or_mixed_up_are_corrupt() -> None:
    manifest = Manifest.build(some_tensors())
    kind, layers = msgpack.unpackb(manifest.encoded)
    with pytest.raises(Corrupt, match="canonical"):
        root_layers(msgpack.packb([kind, layers[::-1]]))
    layers[1][1], layers[2][1] = layers[2][1], layers[1][1]
    with pytest.raises(Corrupt, match="another layer"):
        Manifest.assemble(msgpack.packb([kind, layers]), {layer.digest: layer.encoded for layer in manifest.layers})


@pytest.mark.parametrize("number", ["9" * 5000, "\u0663", "00", "-1"])
def test_a_layer_s_number_that_is_none_is_corrupt(number: str) -> None:
    """Python refuses to read long numbers, by an error that nobody waits for, and reads digits of all scripts."""
    content = msgpack.packb(["pdbus-root-1", [[f"layers.{number}", bytes(32)]]])
    with pytest.raises(Corrupt):
        root_layers(content)
    tensor = f"model.layers.{number}.x"
    with pytest.raises(Corrupt):
        Layer.decode(msgpack.packb(["pdbus-layer-1", f"layers.{number}", [[tensor, "fp32", [1], [bytes(32)]]]]))
