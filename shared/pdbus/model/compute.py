"""The compute class: what numbers depend on besides weights, as part of prefix and result keys."""

from __future__ import annotations

import platform

import torch

from pdbus.kv.format import KvDtype
from pdbus.model.native_llama import Precision
from pdbus.native.build import kernel_version


def compute_class(device: torch.device | str, kv_dtype: KvDtype = "fp32") -> str:
    """Names device kind and kernels, the dtypes of weights, activations and KV, and the torch version.

    Workers of one class give equal answers: in fp32 up to ties between the two best logits."""
    device = torch.device(device)
    if device.type == "cpu":
        kernels = f"{platform.machine()}-{torch.backends.cpu.get_cpu_capability()}"
    else:
        kernels = torch.cuda.get_device_name(device).replace(" ", "-")
    return f"{device.type}-{kernels}/eager/w-fp32/a-fp32/kv-{kv_dtype}/torch-{torch.__version__}".lower()


def native_compute_class(precision: Precision, kv_dtype: KvDtype) -> str:
    """Of the native kernels. They give the same bits with every instruction set, so that it isn't named."""
    return f"cpu/native-{kernel_version()}/w-{precision}/kv-{kv_dtype}"
