"""What commits change: tensors of the stack's checkpoint, scaled by a little, differently each time."""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Protocol

import numpy as np

from pdbus.client.weights.update import Update
from pdbus.model.checkpoint import open_checkpoint
from pdbus.weights.blocks import Array, block_count, rows_per_block
from pdbus.weights.layer import layer_of

_STEP = 1e-4
"""Of scaling: far above what fp32 rounds away, far below what changes what a model says by much."""


class Change(Protocol):
    async def __call__(self, update: Update) -> None:
        """Stages one version's changes."""


class Changes:
    """Makes them, each with values that no earlier one had. The checkpoint stays in memory, 0.5 GB by default."""

    def __init__(self, checkpoint: Path) -> None:
        self._tensors: Mapping[str, Array] = dict(open_checkpoint(checkpoint).tensors())
        self._made = 0
        layers = {layer_of(name) for name in self._tensors}
        self._layers = sorted(layer for layer in layers if layer.startswith("layers."))
        self._blocks = [
            (name, index)
            for name, tensor in self._tensors.items()
            for index in range(block_count(tensor.shape, "fp32"))
        ]

    @property
    def nbytes(self) -> int:
        """Of the whole model."""
        return sum(tensor.nbytes for tensor in self._tensors.values())

    @property
    def decoder_layers(self) -> int:
        return len(self._layers)

    @property
    def blocks(self) -> int:
        return len(self._blocks)

    def two_layers(self) -> Change:
        """Every element of every tensor of two decoder layers, other ones each time."""
        scale = self._scale()
        chosen = {self._layers[(2 * self._made + i) % len(self._layers)] for i in range(2)}
        return self.tensors([name for name in self._tensors if layer_of(name) in chosen], scale)

    def everything(self) -> Change:
        return self.tensors(list(self._tensors), self._scale())

    def named(self, *names: str) -> Change:
        return self.tensors(list(names), self._scale())

    def tensors(self, names: list[str], scale: np.float32) -> Change:
        async def stage(update: Update) -> None:
            for name in names:
                await update.stage(name, self._tensors[name] * scale)

        return stage

    def scattered(self, share: float) -> Change:
        """Whole blocks, anywhere in the model: that part of all."""
        chosen = random.Random(self._made).sample(self._blocks, max(1, round(share * len(self._blocks))))
        return self.some_blocks(chosen)

    def one_block(self) -> Change:
        return self.some_blocks([random.Random(self._made).choice(self._blocks)])

    def some_blocks(self, chosen: list[tuple[str, int]]) -> Change:
        scale = self._scale()

        async def stage(update: Update) -> None:
            for name, rows in self._rows(chosen):
                await update.stage_rows(name, rows, self._tensors[name][rows] * scale)

        return stage

    def _rows(self, chosen: list[tuple[str, int]]) -> Iterator[tuple[str, Array]]:
        """Of each tensor, all rows of its chosen blocks."""
        by: dict[str, list[Array]] = {}
        for name, index in sorted(chosen):
            shape = self._tensors[name].shape
            step = rows_per_block(shape, "fp32")
            by.setdefault(name, []).append(np.arange(index * step, min((index + 1) * step, shape[0])))
        return ((name, np.concatenate(rows)) for name, rows in by.items())

    def _scale(self) -> np.float32:
        self._made += 1
        return np.float32(1 + _STEP * self._made)
