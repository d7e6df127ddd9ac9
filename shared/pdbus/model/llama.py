"""The Llama family in one forward pass: pre-norm attention with RoPE and grouped queries, SwiGLU MLP, RMSNorm.

The brands differ only by fields of ModelConfig and by which tensors are there. Layers hold weights and nothing else,
so that versions share those that did not change (model/build.py).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeAlias

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from pdbus.kv.format import PAGE_TOKENS, KvDtype, PageFormat
from pdbus.kv.pool import KvPool, Slots
from pdbus.messages.common import Digest
from pdbus.model.attention import SequencePlan, attend, plan
from pdbus.model.batch import Batch
from pdbus.model.config import ModelConfig
from pdbus.model.linear import Linear
from pdbus.model.rope import Rope, Rotation

Array: TypeAlias = "np.ndarray[Any, Any]"


class Rows(Protocol):
    """A table of which rows are taken by their numbers."""

    def __getitem__(self, ids: Tensor, /) -> Tensor: ...


@dataclass(frozen=True, slots=True)
class Layer:
    """The weights of one decoder layer. Immutable, and shared by all versions that have them."""

    input_norm: Tensor
    qkv: Linear
    qk_norm: Tensor | None
    """Gains for each head of q, then of k: [heads + kv_heads, head_dim]."""
    out: Linear
    post_norm: Tensor
    gate_up: Linear
    down: Linear


@dataclass(frozen=True, slots=True)
class _Step:
    """What all layers of one step share."""

    rotation: Rotation
    slots: Slots
    sequences: tuple[SequencePlan, ...]
    pool: KvPool


@dataclass(frozen=True)
class Llama:
    """One version of a model, ready to compute. Made by `build`."""

    config: ModelConfig
    device: torch.device
    embedding: Rows
    """[vocab, hidden]"""
    layers: Sequence[Layer]
    final_norm: Tensor
    head: Linear
    rope: Rope
    digests: Mapping[str, Digest]
    """Layer name (`embed`, `layers.0`, …, `head`) -> digest, of what this was built from."""

    def page_format(self, kv_dtype: KvDtype = "fp32") -> PageFormat:
        """The format of the pages that `forward` needs."""
        return PageFormat(self.config.layers, self.config.kv_heads, self.config.head_dim, PAGE_TOKENS, kv_dtype)

    @torch.inference_mode()
    def forward(self, batch: Batch, pool: KvPool, on_layer: Callable[[int], None] | None = None) -> Array:
        """Computes one step; returns fp32 logits [len(batch.logit_rows), vocab], in the host's memory.

        K and V of the batch's tokens are in the pool afterwards. `on_layer(i)` is called as soon as those of layer i
        are, while the layers above it are still to come. Attention reads K and V from the pool only, never what was
        just computed, so that fresh, cached and handed-over pages are the same to it."""
        step = self._begin(batch, pool)
        x = self.embedding[self._tensor(batch.tokens)]  # [tokens, hidden]
        for index, layer in enumerate(self.layers):
            attended = self._attention(index, layer, self._norm(x, layer.input_norm), step, on_layer)
            x = x + layer.out(attended)
            gate, up = layer.gate_up(self._norm(x, layer.post_norm)).chunk(2, dim=-1)
            x = x + layer.down(F.silu(gate) * up)
        wanted = x[self._tensor(batch.logit_rows)]
        logits: Array = self.head(self._norm(wanted, self.final_norm)).cpu().numpy()
        return logits

    def _begin(self, batch: Batch, pool: KvPool) -> _Step:
        return _Step(
            rotation=self.rope.at(self._tensor(batch.positions)),
            slots=pool.slots((piece.page_ids, piece.past, piece.length) for piece in batch.sequences),
            sequences=tuple(plan(piece, pool, self.config.sliding_window) for piece in batch.sequences),
            pool=pool,
        )

    def _attention(
        self, index: int, layer: Layer, x: Tensor, step: _Step, on_layer: Callable[[int], None] | None
    ) -> Tensor:
        """x [tokens, hidden], normed -> what each head saw, [tokens, heads * head_dim]."""
        config = self.config
        heads = layer.qkv(x).view(len(x), -1, config.head_dim)  # [tokens, heads + 2 * kv_heads, head_dim]
        qk, v = torch.split(heads, [config.heads + config.kv_heads, config.kv_heads], dim=1)
        if layer.qk_norm is not None:
            qk = F.rms_norm(qk, (config.head_dim,), eps=config.rms_norm_eps) * layer.qk_norm
        q, k = torch.split(step.rotation(qk), [config.heads, config.kv_heads], dim=1)
        step.pool.write(index, step.slots, k, v)
        if on_layer:
            on_layer(index)
        windowed = config.windowed_layers[index]
        seen = [attend(q[one.rows], index, one, step.pool, windowed=windowed) for one in step.sequences]
        return torch.cat(seen).view(len(x), -1)

    def _norm(self, x: Tensor, gain: Tensor) -> Tensor:
        return F.rms_norm(x, gain.shape, gain, self.config.rms_norm_eps)

    def _tensor(self, values: object) -> Tensor:
        return torch.tensor(values, dtype=torch.int64, device=self.device)
