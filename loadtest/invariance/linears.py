"""What bits that don't depend on the batch cost in the linear layers: ours, and PyTorch's int8 kernels with one scale
for all activations of a call (the fastest there are in it; a row's result then depends on its neighbours), and with one
for each row, by the same kernels."""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from statistics import median
from typing import Any

import numpy as np
import torch

from loadtest.markdown import markdown
from pdbus.model.config import ModelConfig
from pdbus.model.quantize import groups8
from pdbus.native.library import NativeEngine
from pdbus.native.pack import pack_g8

_TURN_S = 0.02
"""Of one timing: many calls where they are short."""


@dataclass(frozen=True)
class Cost:
    """Microseconds of one layer's four linears."""

    rows: int
    ours: float
    torch_per_batch: float
    torch_per_row: float

    def as_json(self) -> dict[str, Any]:
        return asdict(self)


def costs(config: ModelConfig, rows: Sequence[int], threads: int, rounds: int) -> list[Cost]:
    """Interleaved; medians over the rounds. Raises NativeUnavailable where there are no kernels for this machine."""
    torch.set_num_threads(threads)
    weights = [
        (np.random.default_rng(0).standard_normal(shape) / np.sqrt(shape[1])).astype(np.float32)
        for shape in _shapes(config)
    ]
    with NativeEngine(threads) as engine:
        ours = [_ours(engine, weight) for weight in weights]
        per_batch, per_row = zip(*map(_torch, weights), strict=True)
        ways = (ours, per_batch, per_row)
        found = []
        for count in rows:
            inputs = [
                np.random.default_rng(1).standard_normal((count, weight.shape[1])).astype(np.float32)
                for weight in weights
            ]
            samples: list[list[float]] = [[] for _ in ways]
            for _ in range(rounds):
                for way, sample in zip(ways, samples, strict=True):
                    sample.append(sum(_time_s(call, x) for call, x in zip(way, inputs, strict=True)))
            found.append(Cost(count, *(median(sample) * 1e6 for sample in samples)))
    return found


def render(found: Sequence[Cost]) -> str:
    head = ["rows", "ours, µs a layer", "torch, scale per batch", "torch, scale per row", "ours ÷ per batch"]
    head += ["torch per row ÷ per batch"]
    return markdown(head, [_cells(cost) for cost in found])


def _cells(cost: Cost) -> list[str]:
    times = (f"{value:.0f}" for value in (cost.ours, cost.torch_per_batch, cost.torch_per_row))
    ratios = (f"{value / cost.torch_per_batch:.2f}" for value in (cost.ours, cost.torch_per_row))
    return [str(cost.rows), *times, *ratios]


def _shapes(config: ModelConfig) -> list[tuple[int, int]]:
    heads, kv_heads, width = config.heads, config.kv_heads, config.head_dim
    hidden, inner = config.hidden_size, config.intermediate_size
    return [((heads + 2 * kv_heads) * width, hidden), (hidden, heads * width), (2 * inner, hidden), (hidden, inner)]


def _ours(engine: NativeEngine, weight: np.ndarray) -> Callable[[np.ndarray], object]:
    packed = pack_g8(*groups8(weight))
    return lambda x: engine.linear(packed.struct, x)


def _torch(weight: np.ndarray) -> tuple[Callable[[np.ndarray], object], Callable[[np.ndarray], object]]:
    """(one scale for all rows, one for each). The second: 7 bits, so that no kernel saturates."""
    exact = torch.from_numpy(weight)
    scales = (exact.abs().amax(1) / 127).double()  # others than double give garbage without an error
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that this API will go
        quantised = torch.quantize_per_channel(
            exact, scales, torch.zeros(len(scales), dtype=torch.long), 0, torch.qint8
        )
    packed = torch.ops.quantized.linear_prepack(quantised, None)

    def per_row(x: np.ndarray) -> object:
        rows = torch.from_numpy(x)
        peak = rows.abs().amax(1, keepdim=True)
        y = torch.ops.quantized.linear_with_input_q_dq_qweight_dq_output_fp32(rows / peak, 1 / 63, 64, packed)
        return y.mul_(peak)

    return lambda x: torch.ops.quantized.linear_dynamic(torch.from_numpy(x), packed), per_row


def _time_s(call: Callable[[np.ndarray], object], x: np.ndarray) -> float:
    call(x)
    start, calls = time.perf_counter(), 0
    while (taken_s := time.perf_counter() - start) < _TURN_S or not calls:
        call(x)
        calls += 1
    return taken_s / calls
