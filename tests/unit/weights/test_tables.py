from __future__ import annotations

import pytest

from pdbus.errors import Corrupt, InvalidRequest, NotFound
from pdbus.weights import tables
from pdbus.weights.layer import Layer, Tensor, is_computed, layer_of
from pdbus.weights.manifest import Manifest
from pdbus.weights.tables import Seal, Table

NORM = Tensor("model.norm.weight", "fp32", (1,), (b"n" * 32,))
ITEMS = Table("items", Tensor("table.items", "fp32", (10, 4), (b"a" * 32,)), Seal("0" * 32, "1" * 16, 12))
USERS = Table("users", Tensor("table.users", "fp32", (7, 2), (b"b" * 32,)), Seal("2" * 32, "1" * 16, 0))


def test_tables_of_a_version_are_layers_of_their_own_behind_the_others() -> None:
    manifest = Manifest.build([*USERS.tensors, NORM, *ITEMS.tensors])
    assert [layer.name for layer in manifest.layers] == ["head", "table.items", "table.users"]
    encoded = {layer.digest: layer.encoded for layer in manifest.layers}
    again = Manifest.assemble(manifest.encoded, encoded)
    assert tables.tables(again) == {"items": ITEMS, "users": USERS}
    assert [layer.name for layer in again.layers if is_computed(layer.name)] == ["head"]
    with pytest.raises(NotFound, match="no table other"):
        tables.table(again, "other")


def test_a_seal_changes_only_its_table() -> None:
    before = Manifest.build([*USERS.tensors, NORM, *ITEMS.tensors])
    sealed = ITEMS.sealed(Tensor("table.items", "fp32", (10, 4), (b"c" * 32,)), "3" * 16, 99)
    after = Manifest.build([*USERS.tensors, NORM, *sealed.tensors])
    changed = {layer.name for layer in after.layers} - {
        layer.name for layer in after.layers if layer.digest in {one.digest for one in before.layers}
    }
    assert changed == {"table.items"}
    assert tables.table(after, "items").seal == Seal("0" * 32, "3" * 16, 99)


@pytest.mark.parametrize("name", ["", "a.b", "a/b", "a b", "x" * 65])
def test_what_can_not_name_a_table_is_refused(name: str) -> None:
    with pytest.raises(InvalidRequest):
        tables.layer_name(name)


def test_a_layer_that_is_no_table_is_corrupt() -> None:
    tensor, marker = ITEMS.tensors
    for content in ((tensor,), (marker,), (tensor, marker, Tensor("table.items/x", "u8", (0,), ()))):
        with pytest.raises(Corrupt):
            tables.as_table(Layer("table.items", content))
    assert layer_of(marker.name) == layer_of(tensor.name) == "table.items"
