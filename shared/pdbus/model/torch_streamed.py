"""A model in torch whose weights are mapped files: read as it computes, let go where they don't fit."""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias, overload

import numpy as np
import torch
from torch import Tensor

from pdbus.messages.common import Digest
from pdbus.model.config import ModelConfig
from pdbus.model.linear import Fp32Linear
from pdbus.model.llama import Layer, Llama
from pdbus.model.residency import Residency, embedded
from pdbus.model.rope import Rope
from pdbus.model.shelf import Piece
from pdbus.model.streamed_build import Pieces

Array: TypeAlias = "np.ndarray[Any, Any]"

_LINEARS: Mapping[str, tuple[str, ...]] = {
    "qkv": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    "out": ("self_attn.o_proj",),
    "gate_up": ("mlp.gate_proj", "mlp.up_proj"),
    "down": ("mlp.down_proj",),
}


@dataclass(frozen=True, slots=True)
class TorchForm:
    """A Form (model/streamed_build.py): fp32, as the checkpoint has it but for linears that are fused."""

    config: ModelConfig
    device: torch.device
    residency: Residency

    def layer(self, index: int, tensors: Mapping[str, Array]) -> Piece:
        prefix = f"model.layers.{index}."
        arrays = {
            "input_norm": tensors[f"{prefix}input_layernorm.weight"],
            "post_norm": tensors[f"{prefix}post_attention_layernorm.weight"],
        }
        for name, modules in _LINEARS.items():
            for kind in ("weight", "bias"):
                found = [tensors[full] for module in modules if (full := f"{prefix}{module}.{kind}") in tensors]
                if found:
                    arrays[f"{name}.{kind}"] = np.concatenate(found)
        if self.config.qk_norm:
            q, k = (tensors[f"{prefix}self_attn.{one}_norm.weight"] for one in "qk")  # [head_dim] each
            arrays["qk_norm"] = np.concatenate(
                (np.tile(q, (self.config.heads, 1)), np.tile(k, (self.config.kv_heads, 1)))
            )
        return Piece({}, arrays)

    def patch(self, index: int, old: Piece) -> None:
        """Nothing is quantised, so that there is little to be saved."""

    def embedding(self, rows: Array) -> Piece:
        return Piece({}, {"rows": rows})

    def head(self, rows: Array) -> Piece:
        return Piece({}, {"rows": rows})

    def model(self, pieces: Pieces, digests: Mapping[str, Digest]) -> StreamedLlama:
        return StreamedLlama(
            self.config,
            self.device,
            _Rows(self, pieces.embedding),
            _Layers(self, pieces.layers),
            torch.tensor(pieces.gains, device=self.device),
            _Head(self, pieces.head),
            Rope(self.config, self.device),
            digests,
            pieces,
        )


@dataclass(frozen=True)
class StreamedLlama(Llama):
    """One version of a model, ready to compute."""

    pieces: Pieces

    @property
    def kind(self) -> Hashable:
        """Its own: no other version is computed in a step of it, as its layers pass by for it alone."""
        return id(self)


@dataclass(frozen=True, slots=True)
class _Rows:
    form: TorchForm
    pieces: tuple[Piece, ...]

    def __getitem__(self, ids: Tensor) -> Tensor:
        return torch.from_numpy(embedded(self.pieces, ids.cpu().numpy(), self.form.residency)).to(self.form.device)


@dataclass(frozen=True, slots=True)
class _Head:
    """A Linear (model/linear.py) in runs of its rows."""

    form: TorchForm
    pieces: tuple[Piece, ...]

    def __call__(self, x: Tensor) -> Tensor:
        runs = []
        for index in self.form.residency.walk(self.pieces):
            weight = torch.from_numpy(self.pieces[index].arrays["rows"]).to(self.form.device)
            runs.append(torch.nn.functional.linear(x, weight))
        return torch.cat(runs, dim=-1)


@dataclass(frozen=True, slots=True)
class _Layers(Sequence[Layer]):
    form: TorchForm
    pieces: tuple[Piece, ...]

    def __len__(self) -> int:
        return len(self.pieces)

    @overload
    def __getitem__(self, index: int) -> Layer: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[Layer]: ...
    def __getitem__(self, index: int | slice) -> Layer | Sequence[Layer]:
        if isinstance(index, slice):
            return _Layers(self.form, self.pieces[index])
        return _layer(self.pieces[index], self.form.device)

    def __iter__(self) -> Iterator[Layer]:
        """Each is let go as soon as the next one is asked for."""
        for index in self.form.residency.walk(self.pieces):
            yield self[index]


def _layer(piece: Piece, device: torch.device) -> Layer:
    arrays = {name: torch.from_numpy(array).to(device) for name, array in piece.arrays.items()}

    def linear(name: str) -> Fp32Linear:
        return Fp32Linear(arrays[f"{name}.weight"], arrays.get(f"{name}.bias"))

    return Layer(
        input_norm=arrays["input_norm"],
        qkv=linear("qkv"),
        qk_norm=arrays.get("qk_norm"),
        out=linear("out"),
        post_norm=arrays["post_norm"],
        gate_up=linear("gate_up"),
        down=linear("down"),
    )
