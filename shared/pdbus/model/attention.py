"""Attention of each sequence of a batch over its own pages: what one sequence gets never depends on its neighbours."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from pdbus.kv.pool import KvPool
from pdbus.model.batch import SequenceSlice


@dataclass(frozen=True, slots=True)
class SequencePlan:
    """What a sequence's attention needs in every layer; made once per step."""

    rows: slice
    """Its new tokens in the batch."""
    total: int
    """Tokens in all: past and new."""
    pages: Tensor
    """Its pages, [pages]."""
    full_mask: Tensor | None
    """[new tokens, total], True where a query sees a key; None: it sees all."""
    window_mask: Tensor | None
    """The same in layers with the sliding window."""


def plan(piece: SequenceSlice, pool: KvPool, window: int | None) -> SequencePlan:
    """`window`: the sliding window of those layers that have one."""
    total = piece.past + piece.length
    alone = piece.length == 1  # the last token sees all before it
    return SequencePlan(
        rows=slice(piece.start, piece.start + piece.length),
        total=total,
        pages=pool.page_index(piece.page_ids[: pool.format.pages_for(total)]),
        full_mask=None if alone else _mask(piece, total, pool.device),
        window_mask=None if window is None or (alone and total <= window) else _mask(piece, window, pool.device),
    )


def attend(queries: Tensor, layer: int, sequence: SequencePlan, pool: KvPool, *, windowed: bool) -> Tensor:
    """One sequence, one layer: queries [new tokens, heads, head_dim] -> [new tokens, heads, head_dim].

    Query head h reads the K and V head h // (heads / kv_heads) (grouped-query attention, arXiv 2305.13245)."""
    k, v = pool.gather(layer, sequence.pages, sequence.total)  # [total, kv_heads, head_dim]
    mask = sequence.window_mask if windowed else sequence.full_mask
    length, heads, width = queries.shape
    kv_heads = k.shape[1]
    k, v = k.transpose(0, 1), v.transpose(0, 1)  # [kv_heads, total, head_dim]
    if length == 1:
        # The query heads of a group are rows of one product: K and V are read once for all of them.
        grouped = queries.view(1, kv_heads, heads // kv_heads, width)
        return F.scaled_dot_product_attention(grouped, k[None], v[None], attn_mask=mask).view(1, heads, width)
    grouped = queries.view(length, kv_heads, -1, width).permute(1, 2, 0, 3)  # [kv_heads, group, new tokens, head_dim]
    shape = (*grouped.shape[:2], *k.shape[1:])  # [kv_heads, group, total, head_dim], by stride 0: nothing is copied
    out = F.scaled_dot_product_attention(grouped, k[:, None].expand(shape), v[:, None].expand(shape), attn_mask=mask)
    return out.permute(2, 0, 1, 3).reshape(length, heads, width)


def _mask(piece: SequenceSlice, window: int, device: torch.device) -> Tensor:
    """A query sees itself and what is before it, `window` tokens in all; [new tokens, total]."""
    total = piece.past + piece.length
    query = torch.arange(piece.past, total, device=device)[:, None]
    key = torch.arange(total, device=device)[None]
    return (key <= query) & (key > query - window)
