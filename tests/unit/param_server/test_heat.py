from __future__ import annotations

import time
from pathlib import Path

import numpy as np
import pytest

from pdbus.messages.changelog import Commit
from pdbus.messages.param_server import BlockHeat, HeatReply, TensorHeat
from pdbus.param_server import heat as subject
from pdbus.param_server.heat import HALF_LIFE_S, Heat, changed_blocks
from pdbus.param_server.store import BlockStore
from pdbus.stack.weights_heat import together
from tests.support.weights import manifest_and_blocks, some_arrays

A, B = b"a" * 32, b"b" * 32
NAMES = {A: ("q", 0), B: ("k", 3)}


class Clock:
    now_s = 1e9

    def __call__(self) -> float:
        return self.now_s


def test_reads_and_updates_are_counted_by_name_and_halve() -> None:
    clock = Clock()
    heat = Heat(clock)
    for _ in range(3):
        heat.read([A, b"?" * 32])
    heat.read([B])
    heat.name(NAMES)
    heat.update([("k", 3)], clock.now_s - HALF_LIFE_S)
    assert heat.blocks(9) == (BlockHeat("q", 0, 3.0, 0.0), BlockHeat("k", 3, 1.0, 0.5))
    clock.now_s += HALF_LIFE_S
    heat.read([A])
    heat.name(NAMES)
    assert heat.blocks(1) == (BlockHeat("q", 0, 2.5, 0.0),)
    assert heat.tensors() == (TensorHeat("k", 1, 0.5, 0.25), TensorHeat("q", 1, 2.5, 0.0))


def test_it_counts_on_for_years() -> None:
    clock = Clock()
    heat = Heat(clock)
    for _ in range(300):
        heat.read([A])
        heat.name(NAMES)
        clock.now_s += 7 * HALF_LIFE_S
    heat.read([A])
    heat.name(NAMES)
    (block,) = heat.blocks(1)
    assert block.reads == pytest.approx(1 / (1 - 2**-7))


def test_memory_is_bounded_and_the_hottest_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(subject, "MOST_COUNTED", 64)
    heat = Heat(Clock())
    for start in range(0, 1000, 20):
        digests = [index.to_bytes(32, "big") for index in range(start, start + 20)]
        heat.read([A, *digests])
        heat.name({A: ("hot", 0), **{digest: ("t", int.from_bytes(digest, "big")) for digest in digests}})
    heat.read(index.to_bytes(32, "big") for index in range(1000))
    assert len(heat._unnamed) == 64
    assert len(heat._reads) <= 64
    assert heat.blocks(1) == (BlockHeat("hot", 0, 50.0, 0.0),)


def test_counting_costs_a_read_of_a_thousand_blocks_next_to_nothing() -> None:
    heat, digests = Heat(), [index.to_bytes(32, "big") for index in range(1024)]
    took = []
    for _ in range(20):
        before = time.perf_counter()
        heat.read(digests)
        took.append(time.perf_counter() - before)
    assert min(took) < 0.002  # sending them takes some 300 ms


def test_what_a_commit_changed(tmp_path: Path) -> None:
    q1 = "model.layers.1.self_attn.q_proj.weight"
    old = some_arrays()
    embedding = old["model.embed_tokens.weight"].copy()
    embedding[200] += 1
    new = some_arrays(**{"model.embed_tokens.weight": embedding, q1: np.zeros((300, 576), np.float32)})
    with BlockStore(tmp_path, "m") as store:
        manifests = []
        for arrays in (old, new):
            manifest, blocks = manifest_and_blocks(arrays)
            manifests.append(manifest)
            with store.writing() as pack:
                for digest, content in blocks.items():
                    pack.add(digest, memoryview(content))
        before, after = manifests
        layers = tuple((layer.name, layer.digest) for layer in after.layers)
        commit = Commit("tx", after.root, before.root, "me", "", layers)
        assert changed_blocks(store, commit) == [("model.embed_tokens.weight", 1), (q1, 0), (q1, 1), (q1, 2)]
        assert changed_blocks(store, Commit("tx", before.root, None, "me", "", layers)) == []


def test_of_several_servers_reads_add_up_and_updates_are_the_same_ones() -> None:
    replies = [
        HeatReply(
            name, 600.0, (TensorHeat("q", 2, 3.0, 1.0),), (BlockHeat("q", 0, 2.0, 1.0), BlockHeat("q", 1, 1.0, 0.0))
        )
        for name in ("a", "b")
    ]
    found = together(replies, 1)
    assert found.tensors == (TensorHeat("q", 2, 6.0, 1.0),)
    assert found.blocks == (BlockHeat("q", 0, 4.0, 1.0),)


def test_the_picture_shows_layers_and_kinds(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    from pdbus.stack.heat_picture import draw, kind_of

    names = ("model.embed_tokens.weight", "model.layers.0.self_attn.q_proj.weight", "model.layers.1.mlp.up_proj.weight")
    assert [kind_of(name) for name in names] == ["embed_tokens", "q_proj", "up_proj"]
    replies = [HeatReply("a", 600.0, tuple(TensorHeat(name, 1, 1.0, 0.0) for name in names), ())]
    draw(together(replies, 1), tmp_path / "heat.png")
    assert (tmp_path / "heat.png").stat().st_size > 1000
