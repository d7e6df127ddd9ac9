"""Encoders of the BERT family in torch, fp32: token ids of a text in, its one vector out.

A text's vector does not depend on what else is asked for: texts of one length are computed together, unpadded, each
as a matrix of its own in a batched product, which gives it the same bits as alone. One product over the rows of all
texts would not (texts of 3 tokens: 2e-7 off), though it takes half the time for the shortest ones.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from pdbus.messages.common import Digest
from pdbus.model.encoder_config import EncoderConfig

Array: TypeAlias = "np.ndarray[Any, Any]"


@dataclass(frozen=True, slots=True)
class Affine:
    """Of a linear [out, in] or of a norm [hidden]."""

    weight: Tensor
    bias: Tensor


@dataclass(frozen=True, slots=True)
class EncoderLayer:
    qkv: Affine
    """Query, key and value below each other: [3 hidden, hidden]."""
    out: Affine
    attention_norm: Affine
    up: Affine
    down: Affine
    norm: Affine


@dataclass(frozen=True, slots=True)
class Embedding:
    words: Tensor  # [vocab, hidden]
    positions: Tensor  # [position_rows, hidden], the first token type's vector added
    norm: Affine


@dataclass(frozen=True)
class Encoder:
    """One version, ready to compute."""

    config: EncoderConfig
    device: torch.device
    embedding: Embedding
    layers: tuple[EncoderLayer, ...]
    digests: Mapping[str, Digest]
    """Layer name (`embed`, `layers.0`, …) -> digest, of what this was built from."""

    @torch.inference_mode()
    def embed(self, texts: Sequence[Sequence[int]]) -> Array:
        """The vectors of texts of one length (1 to max_tokens ids, special tokens among them), fp32
        [texts, hidden_size]."""
        hidden = self._embedded(texts)  # [texts, tokens, hidden]
        for layer in self.layers:
            hidden = self._layer(layer, hidden)
        sentence = self.config.sentence
        vectors = hidden[:, 0] if sentence.pooling == "cls" else hidden.mean(1)
        if sentence.normalize:
            vectors = functional.normalize(vectors)
        found: Array = vectors.cpu().numpy()
        return found

    def _embedded(self, texts: Sequence[Sequence[int]]) -> Tensor:
        ids = torch.tensor(texts, device=self.device)
        first = self.config.first_position
        positions = self.embedding.positions[first : first + ids.shape[1]]
        return self._norm(self.embedding.norm, self.embedding.words[ids] + positions)

    def _layer(self, layer: EncoderLayer, hidden: Tensor) -> Tensor:
        texts, tokens, _ = hidden.shape
        qkv = _linear(layer.qkv, hidden).view(texts, tokens, 3, self.config.heads, -1)
        q, k, v = qkv.permute(2, 0, 3, 1, 4).unbind()  # [texts, heads, tokens, head_dim] each
        attended = functional.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(texts, tokens, -1)
        hidden = self._norm(layer.attention_norm, hidden + _linear(layer.out, attended))
        inner = functional.gelu(_linear(layer.up, hidden))
        return self._norm(layer.norm, hidden + _linear(layer.down, inner))

    def _norm(self, norm: Affine, hidden: Tensor) -> Tensor:
        return functional.layer_norm(hidden, hidden.shape[-1:], norm.weight, norm.bias, self.config.norm_eps)


def _linear(linear: Affine, texts: Tensor) -> Tensor:
    """[texts, tokens, in] -> [texts, tokens, out], a product for each text."""
    return torch.baddbmm(linear.bias, texts, linear.weight.t().expand(len(texts), -1, -1))
