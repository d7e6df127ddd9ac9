"""The backend of torch: everything in fp32, on whatever device it has."""

from __future__ import annotations

import platform
from collections.abc import Mapping
from types import MappingProxyType

import torch

from pdbus.kv.format import PAGE_TOKENS, KvDtype, PageFormat
from pdbus.kv.pool import KvPool
from pdbus.messages.common import Digest
from pdbus.model.backend import Backend, Model
from pdbus.model.build import TorchBuilder
from pdbus.model.config import ModelConfig
from pdbus.model.llama import Llama


class TorchBackend(Backend):
    def __init__(self, device: str, kv_dtype: KvDtype, threads: int) -> None:
        """`threads`: of the whole process, since torch knows no other."""
        torch.set_num_threads(threads)
        self.compute_class = compute_class(device, kv_dtype)
        self.takes_int8 = False
        self._device, self._kv_dtype = device, kv_dtype

    def begin(
        self,
        config: ModelConfig,
        digests: Mapping[str, Digest],
        reuse: Model | None,
        packed: Mapping[str, str] = MappingProxyType({}),
    ) -> TorchBuilder:
        return TorchBuilder(config, digests, reuse if isinstance(reuse, Llama) else None, self._device, packed)

    def page_format(self, config: ModelConfig) -> PageFormat:
        return PageFormat(config.layers, config.kv_heads, config.head_dim, PAGE_TOKENS, self._kv_dtype, "kv1")

    def pool(self, page_format: PageFormat, pages: int) -> KvPool:
        return KvPool(page_format, pages, self._device)

    def close(self) -> None:
        """It holds nothing."""


def compute_class(device: torch.device | str, kv_dtype: KvDtype) -> str:
    """What numbers depend on besides weights, as part of prefix and result keys: device kind and kernels, the dtypes
    of weights, activations and KV, and the torch version.

    Workers of one class give equal answers up to ties between the two best logits."""
    device = torch.device(device)
    if device.type == "cpu":
        kernels = f"{platform.machine()}-{torch.backends.cpu.get_cpu_capability()}"
    else:
        kernels = torch.cuda.get_device_name(device).replace(" ", "-")
    return f"{device.type}-{kernels}/eager/w-fp32/a-fp32/kv-{kv_dtype}/torch-{torch.__version__}".lower()
