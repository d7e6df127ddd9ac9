"""The engines and precisions that ours is measured in, and what a decode step reads in each."""

from __future__ import annotations

from dataclasses import dataclass, replace

from loadtest.peers.base import Shape, Weights
from pdbus.model.backends import BackendOptions


@dataclass(frozen=True)
class Row:
    options: BackendOptions
    bits: float
    """Of a weight, with its share of scales."""
    kv_bytes: int
    """Of a value of KV."""


OURS: dict[str, Row] = {
    "torch": Row(BackendOptions("torch", "fp32", "fp32"), 32.0, 4),
    "fp32": Row(BackendOptions("native", "fp32", "fp32"), 32.0, 4),
    "int8": Row(BackendOptions("native", "int8", "int8"), 9.0, 1),
    "int4": Row(BackendOptions("native", "int4", "int8"), 5.0, 1),
}
"""`torch` in fp32; else the native engine, by what `pdbus up --precision` takes, with KV in int8 below fp32."""


def options_of(row: str, threads: int) -> BackendOptions:
    return replace(OURS[row].options, threads=threads)


def reads(row: str, sizes: Shape) -> Weights:
    return sizes.weights(OURS[row].bits, OURS[row].kv_bytes)
