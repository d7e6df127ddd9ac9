"""The versions of an encoder that a worker holds, and how one is loaded over the bus."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass

from pdbus.context import LONGEST_DEADLINE_S, RequestContext
from pdbus.engine.loaded import Loaded
from pdbus.engine.sources import WeightSource
from pdbus.messages.common import Digest
from pdbus.model.encoder import Encoder
from pdbus.model.encoder_build import build_encoder, encoder_compute_class, needed_for_encoder
from pdbus.model.families import config_of, embedding
from pdbus.weights.layer import is_computed


@dataclass(frozen=True, slots=True)
class EncoderVersion:
    """One root, ready to compute. Whoever computes with it keeps it, so that it needs no pin."""

    root: Digest
    encoder: Encoder


class EncoderVersions(Loaded[EncoderVersion]):
    """`device`: as torch spells it."""

    def __init__(self, source: WeightSource, device: str, on_change: Callable[[], object] = lambda: None) -> None:
        super().__init__(on_change)
        self.compute_class = encoder_compute_class(device)
        self._source, self._device = source, device

    async def _load(self, root: Digest) -> EncoderVersion:
        """Fetches the layers that no other version holds. Raises UnsupportedModel for one that embeds nothing."""
        progress, ctx = self._loading(root), RequestContext.after(LONGEST_DEADLINE_S)
        config = embedding(config_of(await self._source.meta(root, ctx)))
        manifest = await self._source.manifest(root, ctx)
        digests = {layer.name: layer.digest for layer in manifest.layers if is_computed(layer.name)}
        others = [version.encoder for version in self._ready.values()]
        reuse = max(others, key=lambda encoder: len(digests.items() & encoder.digests.items()), default=None)
        needed = needed_for_encoder(config, digests, reuse)
        arrays = await self._source.tensors(root, ctx, needed, progress=progress)
        encoder = await asyncio.to_thread(build_encoder, config, digests, arrays, reuse, self._device)
        return EncoderVersion(root, encoder)
