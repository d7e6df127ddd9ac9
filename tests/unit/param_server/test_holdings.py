from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from pdbus.canonical import content_digest
from pdbus.param_server.holdings import Holdings
from pdbus.param_server.store import BlockStore
from pdbus.weights.blocks import SHARDS
from tests.support.weights import manifest_and_blocks, some_arrays

ALL = frozenset(range(SHARDS))


@pytest.fixture
def store(tmp_path: Path):
    with BlockStore(tmp_path, "m") as store:
        yield store


def put(store: BlockStore, blocks: dict[bytes, bytes]) -> None:
    with store.writing() as pack:
        for digest, content in blocks.items():
            pack.add(digest, memoryview(content))


def test_a_version_whose_manifest_is_missing_leaves_no_shard_whole(store: BlockStore) -> None:
    manifest, _ = manifest_and_blocks(some_arrays())
    gap = Holdings(store).gap([manifest.root], ALL)
    assert (gap.roots, gap.shards, gap.closed) == ((manifest.root,), frozenset(), False)


def test_a_missing_block_is_named_and_only_its_shard_is_not_whole(store: BlockStore) -> None:
    manifest, blocks = manifest_and_blocks(some_arrays())
    block = next(b for b in manifest.blocks() if b.tensor == "model.embed_tokens.weight" and b.index == 3)
    put(store, {digest: content for digest, content in blocks.items() if digest != block.digest})
    holdings = Holdings(store)
    gap = holdings.gap([manifest.root], ALL)
    assert gap.blocks == (block,)
    assert gap.shards == ALL - {block.shard}
    assert holdings.whole([manifest.root], gap) == ()
    without = holdings.gap([manifest.root], ALL - {block.shard})
    assert without.closed
    assert holdings.whole([manifest.root], without) == (manifest.root,)


def test_with_everything_here_the_gap_is_closed(store: BlockStore) -> None:
    manifest, blocks = manifest_and_blocks(some_arrays())
    put(store, blocks)
    holdings = Holdings(store)
    gap = holdings.gap([manifest.root], ALL)
    assert gap.closed
    assert gap.shards == ALL
    assert holdings.whole([manifest.root], gap) == (manifest.root,)


def test_blocks_that_two_versions_share_are_asked_for_once(store: BlockStore) -> None:
    one, blocks = manifest_and_blocks(some_arrays())
    other, more = manifest_and_blocks(some_arrays(**{"model.norm.scale": np.array(2.0, np.float32)}))
    manifests = {content_digest(content): content for m in (one, other) for content in m.manifests()}
    put(store, manifests)
    gap = Holdings(store).gap([one.root, other.root], ALL)
    assert gap.roots == ()
    assert sorted(block.digest for block in gap.blocks) == sorted((blocks.keys() | more.keys()) - manifests.keys())
