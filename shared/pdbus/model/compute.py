"""The compute class: what numbers depend on besides weights, as part of prefix and result keys."""

from __future__ import annotations

import platform

import torch


def compute_class(device: torch.device | str) -> str:
    """Names device kind and kernels, the dtypes of weights, activations and KV, and the torch version.

    Workers of one class give equal answers: in fp32 up to ties between the two best logits."""
    device = torch.device(device)
    if device.type == "cpu":
        kernels = f"{platform.machine()}-{torch.backends.cpu.get_cpu_capability()}"
    else:
        kernels = torch.cuda.get_device_name(device).replace(" ", "-")
    return f"{device.type}-{kernels}/eager/w-fp32/a-fp32/kv-fp32/torch-{torch.__version__}".lower()
