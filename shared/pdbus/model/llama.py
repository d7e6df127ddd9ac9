"""The Llama family in one forward pass: pre-norm attention with RoPE and grouped queries, SwiGLU MLP, RMSNorm.

The brands differ only by fields of ModelConfig and by which tensors are there. Layers hold weights and nothing else,
so that versions share those that did not change (model/build.py).
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
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
from pdbus.model.batch import Batch, check_streams
from pdbus.model.config import ModelConfig
from pdbus.model.linear import Linear
from pdbus.model.rope import Rope, Rotation
from pdbus.model.runs import over

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

    @property
    def kind(self) -> Hashable:
        return self.config, self.device

    @torch.inference_mode()
    def forward(
        self,
        batch: Batch,
        pool: KvPool,
        on_layer: Callable[[int], None] | None = None,
        *,
        beside: Sequence[tuple[Llama, Batch]] = (),
    ) -> Array:
        """Computes one step, as Model.forward; the logits are in the host's memory.

        Attention reads K and V from the pool only, never what was just computed, so that fresh, cached and handed-over
        pages are the same to it."""
        models, batches = [self, *(model for model, _ in beside)], [batch, *(one for _, one in beside)]
        whole = Batch.joined(batches)
        rows, wanted = [len(one.tokens) for one in batches], [len(one.logit_rows) for one in batches]
        step, tokens = self._begin(whole, pool), self._tensor(whole.tokens)
        check_streams(whole, pool)
        if whole.first_layer:
            x = pool.stream(whole.first_layer, step.slots)  # [tokens, hidden]
        else:
            x = over(rows, [model.embedding for model in models], lambda table, own: table[tokens[own]])
        passing = zip(*(model.layers[whole.first_layer :] for model in models), strict=True)
        for index, layers in enumerate(passing, whole.first_layer):
            pool.keep_stream(index, step.slots, x)
            x = self._layer(index, rows, layers, x, step, on_layer)
        x = x[self._tensor(whole.logit_rows)]
        normed = over(wanted, [model.final_norm for model in models], lambda gain, own: self._norm(x[own], gain))
        logits: Array = (
            over(wanted, [model.head for model in models], lambda head, own: head(normed[own])).cpu().numpy()
        )
        return logits

    def _layer(
        self,
        index: int,
        rows: Sequence[int],
        layers: Sequence[Layer],
        x: Tensor,
        step: _Step,
        on_layer: Callable[[int], None] | None,
    ) -> Tensor:
        """The residual stream, [tokens, hidden], before and after a layer; `rows`: how many go through each."""
        heads = over(rows, layers, lambda layer, own: self._heads(layer, self._norm(x[own], layer.input_norm)))
        attended = self._attention(index, heads, step, on_layer)

        def rest(layer: Layer, own: slice) -> Tensor:
            y = x[own] + layer.out(attended[own])
            gate, up = layer.gate_up(self._norm(y, layer.post_norm)).chunk(2, dim=-1)
            return y + layer.down(F.silu(gate) * up)

        return over(rows, layers, rest)

    def _begin(self, batch: Batch, pool: KvPool) -> _Step:
        return _Step(
            rotation=self.rope.at(self._tensor(batch.positions)),
            slots=pool.slots((piece.page_ids, piece.past, piece.length) for piece in batch.sequences),
            sequences=tuple(plan(piece, pool, self.config.sliding_window) for piece in batch.sequences),
            pool=pool,
        )

    def _heads(self, layer: Layer, x: Tensor) -> Tensor:
        """x [tokens, hidden], normed -> q, k and v before their rotation, [tokens, heads + 2 * kv_heads, head_dim]."""
        config = self.config
        heads = layer.qkv(x).view(len(x), -1, config.head_dim)
        if layer.qk_norm is None:
            return heads
        qk, v = torch.split(heads, [config.heads + config.kv_heads, config.kv_heads], dim=1)
        qk = F.rms_norm(qk, (config.head_dim,), eps=config.rms_norm_eps) * layer.qk_norm
        return torch.cat((qk, v), dim=1)

    def _attention(self, index: int, heads: Tensor, step: _Step, on_layer: Callable[[int], None] | None) -> Tensor:
        """What each head saw, [tokens, heads * head_dim]."""
        config = self.config
        qk, v = torch.split(heads, [config.heads + config.kv_heads, config.kv_heads], dim=1)
        q, k = torch.split(step.rotation(qk), [config.heads, config.kv_heads], dim=1)
        step.pool.write(index, step.slots, k, v)
        if on_layer:
            on_layer(index)
        windowed = config.windowed_layers[index]
        seen = [attend(q[one.rows], index, one, step.pool, windowed=windowed) for one in step.sequences]
        return torch.cat(seen).view(len(heads), -1)

    def _norm(self, x: Tensor, gain: Tensor) -> Tensor:
        return F.rms_norm(x, gain.shape, gain, self.config.rms_norm_eps)

    def _tensor(self, values: object) -> Tensor:
        return torch.tensor(values, dtype=torch.int64, device=self.device)
