"""The backend of torch: everything in fp32, on whatever device it has."""

from __future__ import annotations

import platform
from collections.abc import Mapping

import torch

from pdbus.caching.cache_folder import CacheFolder
from pdbus.kv.format import NO_STREAMS, PAGE_TOKENS, KvDtype, PageFormat, StreamFormat
from pdbus.kv.pool import KvPool
from pdbus.messages.common import Digest
from pdbus.model.backend import Backend, Builder, Model
from pdbus.model.build import TorchBuilder
from pdbus.model.config import ModelConfig
from pdbus.model.llama import Llama
from pdbus.model.parts import NO_CHANGES, NO_TENSORS, Changes, Tensors, head_source, packed_dtypes
from pdbus.model.piece_keys import PieceKeys
from pdbus.model.residency import Residency
from pdbus.model.shelf import Shelf
from pdbus.model.streamed_build import StreamedBuilder
from pdbus.model.torch_streamed import StreamedLlama, TorchForm


class TorchBackend(Backend):
    def __init__(
        self,
        device: str,
        kv_dtype: KvDtype,
        threads: int,
        folder: CacheFolder | None = None,
        weight_bytes: int | None = None,
        *,
        layer_groups: int = 1,
    ) -> None:
        """`threads`: of the whole process, since torch knows no other. `weight_bytes`: memory for weights, of a model
        that is read from `folder` as it computes."""
        self.layer_groups = layer_groups
        torch.set_num_threads(threads)
        self.compute_class = compute_class(device, kv_dtype)
        self.takes_int8 = False
        self._device, self._kv_dtype = device, kv_dtype
        self._shelf = Shelf(folder, "torch") if folder else None
        self._residency = Residency(weight_bytes) if weight_bytes is not None else None

    def begin(
        self,
        config: ModelConfig,
        digests: Mapping[str, Digest],
        reuse: Model | None,
        changes: Changes = NO_CHANGES,
        tensors: Tensors = NO_TENSORS,
    ) -> Builder[Llama]:
        if self._shelf and self._residency:
            form = TorchForm(config, torch.device(self._device), self._residency)
            pieces = reuse.pieces if isinstance(reuse, StreamedLlama) and reuse.config == config else None
            keys = PieceKeys(self._shelf, config, digests, tensors, head_source(config))
            return StreamedBuilder(form, self._residency, keys, pieces, changes)
        old = reuse if isinstance(reuse, Llama) else None
        return TorchBuilder(config, digests, old, self._device, packed_dtypes(tensors))

    def page_format(self, config: ModelConfig) -> PageFormat:
        return PageFormat(config.layers, config.kv_heads, config.head_dim, PAGE_TOKENS, self._kv_dtype, "kv1")

    def pool(self, page_format: PageFormat, pages: int, streams: StreamFormat = NO_STREAMS) -> KvPool:
        return KvPool(page_format, pages, self._device, streams)

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
