"""What a param-server has to hold, and what of it the store lacks."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from pdbus.messages.common import Digest
from pdbus.param_server.store import BlockStore
from pdbus.weights.blocks import SHARDS
from pdbus.weights.manifest import Block, Manifest


@dataclass(frozen=True)
class Gap:
    """What is missing at one moment."""

    roots: tuple[Digest, ...]
    """Versions whose manifests are missing, at least in part: what else they need isn't known yet."""
    blocks: tuple[Block, ...]
    shards: frozenset[int]
    """Shards of which all live blocks are here."""

    @property
    def closed(self) -> bool:
        return not self.roots and not self.blocks


class Holdings:
    """Compares the store with the versions that must be kept. Every server holds the manifests of all of them."""

    def __init__(self, store: BlockStore) -> None:
        self._store = store
        self._cuts: dict[Digest, Mapping[int, tuple[Block, ...]]] = {}

    def gap(self, roots: Iterable[Digest], duties: frozenset[int]) -> Gap:
        """Reads the manifests from disk when it first meets them: call it in a thread."""
        roots = tuple(roots)
        self._cuts = {root: cut for root, cut in self._cuts.items() if root in roots}
        unknown = tuple(root for root in roots if not self._know(root))
        missing: dict[Digest, Block] = {}
        incomplete: set[int] = set()
        for cut in self._cuts.values():
            for shard in duties:
                for block in cut.get(shard, ()):
                    if block.digest not in self._store:
                        missing.setdefault(block.digest, block)
                        incomplete.add(shard)
        return Gap(unknown, tuple(missing.values()), frozenset() if unknown else duties - incomplete)

    def whole(self, roots: Iterable[Digest], gap: Gap) -> tuple[Digest, ...]:
        """Those of `roots` of which this server holds all that it has to."""
        missing = {block.digest for block in gap.blocks}
        return tuple(
            root
            for root in roots
            if root in self._cuts
            and not any(block.digest in missing for blocks in self._cuts[root].values() for block in blocks)
        )

    def _know(self, root: Digest) -> bool:
        """Whether the manifests of `root` are here; a manifest that went bad on disk makes it unknown again."""
        manifest = self._store.manifest(root) if root not in self._cuts else None
        if manifest is not None:
            self._cuts[root] = _by_shard(manifest)
        return root in self._cuts


def _by_shard(manifest: Manifest) -> Mapping[int, tuple[Block, ...]]:
    """Blocks by shard; the manifests stand in every shard, since every server holds them."""
    manifests = [block for block in manifest.blocks() if block.tensor.startswith("@")]
    cut: defaultdict[int, list[Block]] = defaultdict(list)
    for block in manifest.blocks():
        cut[block.shard].append(block)
    return {shard: (*manifests, *cut[shard]) for shard in range(SHARDS)}
