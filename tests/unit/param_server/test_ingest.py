from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from pdbus.errors import Cancelled
from pdbus.param_server import ingest as module
from pdbus.param_server.ingest import Ingest
from pdbus.param_server.store import BlockStore
from pdbus.weights.blocks import shard_of
from pdbus.weights.layer import layer_of
from tests.support.weights import fake_checkpoint, manifest_and_blocks, some_arrays


@pytest.fixture(autouse=True)
def _shapes_of_the_fake(monkeypatch: pytest.MonkeyPatch) -> None:
    """The sizes come from the checkpoint's architecture; the fake has none."""
    monkeypatch.setattr(module, "expected", lambda config: config)


def checkpoint(**changed: Any) -> Any:
    fake = fake_checkpoint(some_arrays(**changed))
    fake.config = fake.source.shapes
    return fake


def test_all_blocks_of_a_checkpoint_come_into_the_store(tmp_path: Path) -> None:
    expected, blocks = manifest_and_blocks(some_arrays())
    with BlockStore(tmp_path, "m") as store:
        ingest = Ingest(checkpoint(), store)
        manifest = ingest.run(lambda shard, digest: True)
        assert manifest == expected
        assert all(digest in store for digest in blocks)
        assert {digest: bytes(store.read(digest) or b"") for digest in blocks} == blocks
        assert ingest.total_bytes == sum(array.nbytes for array in some_arrays().values())
        assert ingest.done_bytes >= ingest.total_bytes


def test_only_wanted_shards_are_stored_but_every_manifest(tmp_path: Path) -> None:
    with BlockStore(tmp_path, "m") as store:
        manifest = Ingest(checkpoint(), store).run(lambda shard, digest: shard % 2 == 0)
        assert store.manifest(manifest.root) == manifest
        kept = {b.digest for b in manifest.blocks() if shard_of(b.tensor, b.index) % 2 == 0}
        for block in manifest.blocks():
            assert (block.digest in store) == (block.digest in kept or block.tensor.startswith("@"))


def test_a_changed_checkpoint_adds_only_the_blocks_that_changed(tmp_path: Path) -> None:
    name = "model.layers.1.self_attn.q_proj.weight"
    changed = some_arrays()[name].copy()
    changed[0, 0] += 1
    with BlockStore(tmp_path, "m") as store:
        Ingest(checkpoint(), store).run(lambda shard, digest: True)
        before = sum(path.stat().st_size for path in tmp_path.glob("*.pack"))
        manifest = Ingest(checkpoint(**{name: changed}), store).run(lambda shard, digest: True)
        added = sum(path.stat().st_size for path in tmp_path.glob("*.pack")) - before
        layer = next(layer for layer in manifest.layers if layer.name == layer_of(name))
        assert added == 113 * 576 * 4 + len(layer.encoded) + len(manifest.encoded)


def test_a_stopped_reading_leaves_nothing(tmp_path: Path) -> None:
    with BlockStore(tmp_path, "m") as store:
        ingest = Ingest(checkpoint(), store)
        ingest.stop.set()
        with pytest.raises(Cancelled):
            ingest.run(lambda shard, digest: True)
        assert list(tmp_path.glob("*.pack")) == []
