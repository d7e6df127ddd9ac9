"""Builds a version of an encoder from its tensors, beside an older one whose unchanged layers it shares."""

from __future__ import annotations

import platform
from collections.abc import Mapping
from typing import Any, TypeAlias

import numpy as np
import torch
from torch import Tensor

from pdbus.errors import Corrupt
from pdbus.messages.common import Digest
from pdbus.model.encoder import Affine, Embedding, Encoder, EncoderLayer
from pdbus.model.encoder_config import EncoderConfig, expected_encoder_tensors
from pdbus.weights.layer import layer_of

Arrays: TypeAlias = "Mapping[str, np.ndarray[Any, Any]]"


def encoder_compute_class(device: torch.device | str) -> str:
    """Names device kind and kernels, dtypes and the torch version: workers of one class give the same bits, also with
    different numbers of threads as far as measured (1 and 2)."""
    device = torch.device(device)
    kernels = f"{platform.machine()}-{torch.backends.cpu.get_cpu_capability()}"
    if device.type != "cpu":
        kernels = torch.cuda.get_device_name(device).replace(" ", "-")
    return f"{device.type}-{kernels}/encoder/w-fp32/a-fp32/torch-{torch.__version__}".lower()


def needed_for_encoder(config: EncoderConfig, digests: Mapping[str, Digest], reuse: Encoder | None) -> tuple[str, ...]:
    """The tensors that `build_encoder` will ask for: of layers that `reuse` doesn't hold under the same digest."""
    return tuple(name for name in expected_encoder_tensors(config) if not _same(layer_of(name), digests, reuse))


def build_encoder(
    config: EncoderConfig,
    digests: Mapping[str, Digest],
    arrays: Arrays,
    reuse: Encoder | None = None,
    device: torch.device | str = "cpu",
) -> Encoder:
    """Copies the needed float32 `arrays` (Hugging Face names); `digests` names each layer's content.

    Raises Corrupt where one is missing, or has another shape or dtype than `config` asks for."""
    tensors = _Tensors(config, arrays, torch.device(device))
    embedding = reuse.embedding if reuse and _same("embed", digests, reuse) else _embedding(tensors)
    layers = tuple(
        reuse.layers[index] if reuse and _same(f"layers.{index}", digests, reuse) else _layer(tensors, index)
        for index in range(config.layers)
    )
    return Encoder(config, torch.device(device), embedding, layers, dict(digests))


def _same(layer: str, digests: Mapping[str, Digest], reuse: Encoder | None) -> bool:
    return reuse is not None and layer in digests and reuse.digests.get(layer) == digests[layer]


class _Tensors:
    """Checked copies on the device: a model never shares memory with a receive buffer or a mapped file."""

    def __init__(self, config: EncoderConfig, arrays: Arrays, device: torch.device) -> None:
        self._shapes, self._arrays, self._device = expected_encoder_tensors(config), arrays, device

    def __getitem__(self, name: str) -> Tensor:
        array, shape = self._arrays.get(name), self._shapes[name]
        if array is None:
            raise Corrupt(f"the tensor {name} is missing")
        if array.shape != shape or array.dtype != np.float32:
            raise Corrupt(f"{name} is {array.dtype} {array.shape}, not float32 {shape}")
        return torch.tensor(array, device=self._device)

    def affine(self, *names: str) -> Affine:
        """One, or several below each other."""
        return Affine(
            torch.cat([self[f"{name}.weight"] for name in names]), torch.cat([self[f"{name}.bias"] for name in names])
        )


def _embedding(tensors: _Tensors) -> Embedding:
    # The type is 0 everywhere: texts come one at a time
    types = tensors["embeddings.token_type_embeddings.weight"]
    return Embedding(
        words=tensors["embeddings.word_embeddings.weight"],
        positions=tensors["embeddings.position_embeddings.weight"] + types[0],
        norm=tensors.affine("embeddings.LayerNorm"),
    )


def _layer(tensors: _Tensors, index: int) -> EncoderLayer:
    attention = f"encoder.layer.{index}.attention"
    return EncoderLayer(
        qkv=tensors.affine(*(f"{attention}.self.{name}" for name in ("query", "key", "value"))),
        out=tensors.affine(f"{attention}.output.dense"),
        attention_norm=tensors.affine(f"{attention}.output.LayerNorm"),
        up=tensors.affine(f"encoder.layer.{index}.intermediate.dense"),
        down=tensors.affine(f"encoder.layer.{index}.output.dense"),
        norm=tensors.affine(f"encoder.layer.{index}.output.LayerNorm"),
    )
