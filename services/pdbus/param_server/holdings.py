"""What a param-server has to hold, and what of it the store lacks."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from pdbus.canonical import content_digest
from pdbus.messages.common import Digest
from pdbus.param_server.pack import PackWriter
from pdbus.param_server.store import BlockStore
from pdbus.weights.layer import Layer
from pdbus.weights.manifest import Block, Manifest, root_layers, tensor_blocks


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
    """Compares the store with the versions that must be kept. Every server holds the manifests of all of them.

    Versions share most of their layers, so that the comparison goes by layer: each is looked at once."""

    def __init__(self, store: BlockStore) -> None:
        self._store = store
        self._layers_of: dict[Digest, tuple[Digest, ...]] = {}
        self._cuts: dict[Digest, Mapping[int, tuple[Block, ...]]] = {}
        """By layer digest, its blocks by shard."""
        self._names: dict[Digest, tuple[str, int]] | None = None

    @property
    def names(self) -> Mapping[Digest, tuple[str, int]]:
        """(tensor, slice) of each block, one of them where equal blocks have several names."""
        if self._names is None:
            blocks = (block for cut in self._cuts.values() for some in cut.values() for block in some)
            self._names = {block.digest: (block.tensor, block.index) for block in blocks}
        return self._names

    def gap(self, roots: Iterable[Digest], duties: frozenset[int]) -> Gap:
        """Reads the manifests from disk when it first meets them: call it in a thread."""
        roots = tuple(roots)
        self._layers_of = {root: layers for root, layers in self._layers_of.items() if root in roots}
        unknown = tuple(root for root in roots if not self._know(root))
        named = {digest for layers in self._layers_of.values() for digest in layers}
        if len(kept := {digest: cut for digest, cut in self._cuts.items() if digest in named}) != len(self._cuts):
            self._cuts, self._names = kept, None
        missing: dict[Digest, Block] = {}
        incomplete: set[int] = set()
        for cut in self._cuts.values():
            for shard in duties & cut.keys():
                for block in cut[shard]:
                    if block.digest not in self._store:
                        missing.setdefault(block.digest, block)
                        incomplete.add(shard)
        return Gap(unknown, tuple(missing.values()), frozenset() if unknown else duties - incomplete)

    def whole(self, roots: Iterable[Digest], gap: Gap) -> tuple[Digest, ...]:
        """Those of `roots` of which this server holds all that it has to."""
        missing = {block.digest for block in gap.blocks}
        broken = {
            digest for digest, cut in self._cuts.items() if any(b.digest in missing for bs in cut.values() for b in bs)
        } if missing else set()  # fmt: skip
        return tuple(root for root in roots if root in self._layers_of and broken.isdisjoint(self._layers_of[root]))

    def _know(self, root: Digest) -> bool:
        """Whether the manifests of `root` are here; a manifest that went bad on disk makes it unknown again."""
        known = self._layers_of.get(root)
        if known is not None and root in self._store and all(digest in self._store for digest in known):
            return True
        self._layers_of.pop(root, None)
        content = self._store.read(root)
        if content is None:
            return False
        layers = tuple(digest for _, digest in root_layers(bytes(content)))
        for digest in layers:
            if digest not in self._cuts or digest not in self._store:
                encoded = self._store.read(digest)
                if encoded is None:
                    return False
                self._cuts[digest] = _by_shard(Layer.decode(bytes(encoded)))
                self._names = None
        self._layers_of[root] = layers
        return True


def add_manifests(manifest: Manifest, store: BlockStore, pack: PackWriter) -> None:
    """Those that the store lacks, to a pack of it. Call it in a thread."""
    for content in manifest.manifests():
        if (digest := content_digest(content)) not in store:
            pack.add(digest, memoryview(content))


def _by_shard(layer: Layer) -> Mapping[int, tuple[Block, ...]]:
    cut: defaultdict[int, list[Block]] = defaultdict(list)
    for tensor in layer.tensors:
        for block in tensor_blocks(tensor):
            cut[block.shard].append(block)
    return {shard: tuple(blocks) for shard, blocks in cut.items()}
