"""A layer, embedding or head in which some blocks changed: its packed form with just these rows made anew."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

import numpy as np

from pdbus.model.config import ModelConfig
from pdbus.model.native_layer import packed
from pdbus.model.native_llama import NativeLayer, Precision
from pdbus.native.pack import PackedLinear
from pdbus.native.patch import PatchedLinear

Array: TypeAlias = "np.ndarray[Any, Any]"
Rows: TypeAlias = "Callable[[Array], PackedLinear]"

PATCHABLE: frozenset[Precision] = frozenset({"fp32", "int8-groups", "int4-groups"})
"""Not the rotated one, whose rows are made from several tensors."""


def rows_packed(precision: Precision, *, head: bool = False) -> Rows:
    return lambda weight: packed(weight, None, precision, head=head)


@dataclass(frozen=True, slots=True)
class _Place:
    """Where a tensor's rows are in a packed layer."""

    field: str
    row: int = 0
    every: int = 1
    offset: int = 0


class LayerPatch:
    """Makes a layer from `old`, of which it shares what does not change."""

    def __init__(self, config: ModelConfig, old: NativeLayer, precision: Precision) -> None:
        self._old, self._config = old, config
        self._pack = rows_packed(precision)
        self._linears: dict[str, PatchedLinear] = {}
        self._norms: dict[str, Array] = {}

    def put(self, name: str, start: int, values: Array) -> None:
        """Rows from `start` on of the tensor, by its name within the layer ("self_attn.q_proj.weight")."""
        module, _, kind = name.rpartition(".")
        if module in _NORMS:
            self._norm(_NORMS[module])[start : start + len(values)] = values
        elif module in ("self_attn.q_norm", "self_attn.k_norm"):
            self._put_qk_norm(values, of_q=module.endswith("q_norm"))
        else:
            place = _place(self._config, module)
            if place.field not in self._linears:
                self._linears[place.field] = PatchedLinear(getattr(self._old, place.field))
            linear = self._linears[place.field]
            if kind == "bias":
                linear.put_bias(place.row + start, values, place.every, place.offset)
            else:
                linear.put(place.row + start, values, self._pack, place.every, place.offset)

    def layer(self) -> NativeLayer:
        changed: dict[str, Any] = {field: linear.packed() for field, linear in self._linears.items()}
        return replace(self._old, **(changed | self._norms))

    def _put_qk_norm(self, gains: Array, *, of_q: bool) -> None:
        heads = self._config.heads
        rows = self._norm("qk_norm")  # [heads + kv_heads, head_dim]
        rows[slice(heads) if of_q else slice(heads, None)] = gains

    def _norm(self, field: str) -> Array:
        """A copy of the old gains, made once."""
        if field not in self._norms:
            self._norms[field] = np.array(getattr(self._old, field), np.float32)
        return self._norms[field]


_NORMS = {"input_layernorm": "input_norm", "post_attention_layernorm": "post_norm"}


def _place(config: ModelConfig, module: str) -> _Place:
    q, kv = config.heads * config.head_dim, config.kv_heads * config.head_dim
    return {
        "self_attn.q_proj": _Place("qkv"),
        "self_attn.k_proj": _Place("qkv", row=q),
        "self_attn.v_proj": _Place("qkv", row=q + kv),
        "self_attn.o_proj": _Place("out"),
        "mlp.gate_proj": _Place("gate_up", every=2, offset=0),
        "mlp.up_proj": _Place("gate_up", every=2, offset=1),
        "mlp.down_proj": _Place("down"),
    }[module]
