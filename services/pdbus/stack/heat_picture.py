"""The heat of a model as a picture: a row for each layer, a column for each kind of tensor."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import numpy as np
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from pdbus.messages.param_server import TensorHeat
from pdbus.stack.weights_heat import ModelHeat
from pdbus.weights.layer import layer_of, place

_OF_LAYER = re.compile(r"^.*?layers?\.\d+\.(?:self_attn\.|mlp\.|attention\.)?")


def draw(heat: ModelHeat, path: Path) -> None:
    """Writes a PNG: reads and updates a block, side by side, brighter for more. What was not counted is grey."""
    layers = sorted({layer_of(tensor.tensor) for tensor in heat.tensors}, key=place)
    kinds = list(dict.fromkeys(kind_of(tensor.tensor) for tensor in heat.tensors))
    figure = Figure(figsize=(4 + 0.5 * len(kinds), 2.5 + 0.2 * len(layers)), dpi=120, layout="constrained")
    FigureCanvasAgg(figure)
    sides: tuple[tuple[str, Callable[[TensorHeat], float]], ...] = (
        ("reads", lambda tensor: tensor.reads),
        ("updates", lambda tensor: tensor.updates),
    )
    for axes, (title, count) in zip(figure.subplots(1, 2, sharey=True), sides, strict=True):
        cells = np.full((len(layers), len(kinds)), np.nan)
        for tensor in heat.tensors:
            at = layers.index(layer_of(tensor.tensor)), kinds.index(kind_of(tensor.tensor))
            cells[at] = count(tensor) / max(tensor.blocks, 1)
        axes.set_facecolor("lightgrey")
        image = axes.imshow(cells, aspect="auto", cmap="inferno", vmin=0)
        axes.set_xticks(range(len(kinds)), kinds, rotation=60, ha="right", fontsize=7)
        axes.set_yticks(range(len(layers)), layers, fontsize=7)
        axes.set_title(f"{title} a block, halved every {heat.half_life_s / 60:.0f} min", fontsize=8)
        figure.colorbar(image, ax=axes)
    figure.savefig(path)


def kind_of(tensor: str) -> str:
    """What the tensor is in its layer: `q_proj`, `input_layernorm`, `embed_tokens`."""
    return _OF_LAYER.sub("", tensor).removeprefix("model.").removesuffix(".weight")
