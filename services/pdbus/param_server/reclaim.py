"""Gives disk back: packs, or parts of them, that neither a version nor an open transaction needs any more."""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterable, Set
from dataclasses import dataclass

from pdbus.messages.common import Digest
from pdbus.param_server.pack import Pack
from pdbus.param_server.store import BlockStore
from pdbus.weights.layer import Layer
from pdbus.weights.manifest import root_layers

log = logging.getLogger(__name__)

_HALF = 0.5
SMALL_BYTES = 4 << 20
MOST_SMALL = 32
"""Small packs that may lie side by side before they become one: each commit makes one."""
_MERGED_BYTES = 256 << 20


@dataclass(frozen=True)
class Plan:
    """Packs to delete, some after what lives in them was copied into a new one."""

    copy: tuple[Digest, ...]
    remove: tuple[Pack, ...]


def plan(packs: Iterable[Pack], live: Set[Digest]) -> Plan:
    """A pack goes when nothing in it lives, less than half of it does, or it is one of too many small ones."""
    copy: dict[Digest, None] = {}
    remove: list[Pack] = []
    small: list[tuple[Pack, list[Digest]]] = []
    for pack in packs:
        kept = [digest for digest in pack.spans if digest in live]
        kept_bytes = sum(pack.spans[digest][1] for digest in kept)
        if kept_bytes < _HALF * len(pack.content) or not kept:
            copy |= dict.fromkeys(kept)
            remove.append(pack)
        elif len(pack.content) < SMALL_BYTES:
            small.append((pack, kept))
    if len(small) > MOST_SMALL:
        for pack, kept in small:
            copy |= dict.fromkeys(kept)
            remove.append(pack)
    return Plan(tuple(copy), tuple(remove))


class Reclaimer:
    """Finds what lives, by the manifests in the store, and carries plans out. Call it in a thread, one at a time."""

    def __init__(self, store: BlockStore) -> None:
        self._store = store
        self._layers: dict[Digest, frozenset[Digest]] = {}

    def live(self, roots: Collection[Digest]) -> set[Digest] | None:
        """All digests that these versions consist of; None while a manifest of one of them is missing."""
        found: set[Digest] = set()
        layers: dict[Digest, frozenset[Digest]] = {}
        for root in roots:
            content = self._store.read(root)
            if content is None:
                return None
            found.add(root)
            for _, digest in root_layers(bytes(content)):
                blocks = layers.get(digest) or self._blocks(digest)
                if blocks is None:
                    return None
                layers[digest] = blocks
        self._layers = layers
        return found.union(layers, *layers.values())

    def run(self, roots: Collection[Digest], pinned: Collection[Digest]) -> int:
        """Reclaims what neither these versions nor `pinned` need; returns bytes freed. Does nothing while it is not
        known what lives. Raises Unavailable where the disk refuses."""
        live = self.live(roots)
        if live is None:
            return 0
        found = plan(self._store.packs, live.union(pinned))
        if not found.remove:
            return 0
        before = sum(len(pack.content) for pack in found.remove)
        copied = self._copy(found.copy)
        self._store.remove(found.remove)
        freed = before - copied
        log.info("%d packs were reclaimed: %.1f MB", len(found.remove), freed / 1e6)
        return freed

    def _copy(self, digests: Collection[Digest]) -> int:
        todo = iter(digests)
        copied = 0
        more = True
        while more:
            size = 0
            more = False
            with self._store.writing() as pack:
                for digest in todo:
                    content = self._store.read(digest)
                    if content is None:  # damaged on disk: it will be fetched again
                        continue
                    pack.add(digest, content)
                    size += len(content)
                    if size >= _MERGED_BYTES:
                        more = True
                        break
            copied += size
        return copied

    def _blocks(self, layer: Digest) -> frozenset[Digest] | None:
        if layer in self._layers:
            return self._layers[layer]
        content = self._store.read(layer)
        if content is None:
            return None
        return frozenset(block for tensor in Layer.decode(bytes(content)).tensors for block in tensor.blocks)
