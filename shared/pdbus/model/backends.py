"""The backends, and which one serves: the native kernels on a CPU that has what they need, else torch."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias, TypeVar

import numpy as np
import torch

from pdbus.errors import InvalidRequest
from pdbus.kv.format import PAGE_TOKENS, KvDtype, PageFormat
from pdbus.kv.pool import KvPool
from pdbus.messages.common import Digest
from pdbus.model.backend import Backend, Model
from pdbus.model.build import build, needed_tensors
from pdbus.model.compute import compute_class, native_compute_class
from pdbus.model.config import ModelConfig
from pdbus.model.llama import Llama
from pdbus.model.native_build import build_native, check_supported, needed_native
from pdbus.model.native_llama import NativeLlama
from pdbus.model.native_llama import Precision as Scheme
from pdbus.model.native_pool import NativePool
from pdbus.native.build import NativeUnavailable
from pdbus.native.library import NativeEngine

log = logging.getLogger(__name__)

Arrays: TypeAlias = "Mapping[str, np.ndarray[Any, Any]]"
EngineName: TypeAlias = Literal["auto", "native", "torch"]
Precision: TypeAlias = Literal["fp32", "int8", "int4"]
"""Of the weights that a worker computes with. It quantises them itself, from a root in fp32, as it loads them."""

M = TypeVar("M", Llama, NativeLlama)

_SCHEMES: dict[Precision, Scheme] = {"fp32": "fp32", "int8": "int8-groups", "int4": "int4-groups"}


@dataclass(frozen=True)
class BackendOptions:
    """What a worker's settings ask for."""

    engine: EngineName = "auto"
    precision: Precision = "fp32"
    kv_dtype: KvDtype = "fp32"
    device: str = "cpu"
    threads: int = 1


def open_backend(options: BackendOptions, config: ModelConfig) -> Backend:
    """Takes seconds where the kernels have to be compiled. `auto` falls back to torch, in fp32, and logs why.

    Raises InvalidRequest where just the native engine is wanted, and can't serve this model here."""
    if options.engine == "torch" or torch.device(options.device).type != "cpu":
        return TorchBackend(options.device, options.kv_dtype)
    try:
        check_supported(config)
        return NativeBackend(NativeEngine(options.threads), options.precision, options.kv_dtype)
    except NativeUnavailable as error:
        if options.engine == "native":
            raise InvalidRequest(f"the native engine can't serve here: {error}") from error
        precision = "" if options.precision == "fp32" else f", and in fp32 instead of {options.precision}"
        log.warning("torch computes%s, since the native engine can't serve here: %s", precision, error)
        return TorchBackend(options.device, options.kv_dtype)


class TorchBackend:
    """Everything in fp32, on whatever device torch has."""

    def __init__(self, device: str, kv_dtype: KvDtype) -> None:
        self.compute_class = compute_class(device, kv_dtype)
        self._device, self._kv_dtype = device, kv_dtype

    def needed(self, config: ModelConfig, digests: Mapping[str, Digest], reuse: Model | None) -> tuple[str, ...]:
        return needed_tensors(config, digests, _of(Llama, reuse))

    def build(self, config: ModelConfig, digests: Mapping[str, Digest], tensors: Arrays, reuse: Model | None) -> Llama:
        return build(config, digests, tensors, _of(Llama, reuse), self._device)

    def page_format(self, config: ModelConfig) -> PageFormat:
        return PageFormat(config.layers, config.kv_heads, config.head_dim, PAGE_TOKENS, self._kv_dtype, "kv1")

    def pool(self, page_format: PageFormat, pages: int) -> KvPool:
        return KvPool(page_format, pages, self._device)

    def close(self) -> None:
        """It holds nothing."""


class NativeBackend:
    """Owns the engine: its threads end with `close`."""

    def __init__(self, engine: NativeEngine, precision: Precision, kv_dtype: KvDtype) -> None:
        self.compute_class = native_compute_class(_SCHEMES[precision], kv_dtype)
        self._engine, self._scheme, self._kv_dtype = engine, _SCHEMES[precision], kv_dtype

    def needed(self, config: ModelConfig, digests: Mapping[str, Digest], reuse: Model | None) -> tuple[str, ...]:
        return needed_native(config, digests, self._scheme, _of(NativeLlama, reuse))

    def build(
        self, config: ModelConfig, digests: Mapping[str, Digest], tensors: Arrays, reuse: Model | None
    ) -> NativeLlama:
        try:
            return build_native(config, digests, tensors, self._engine, self._scheme, _of(NativeLlama, reuse))
        except NativeUnavailable as error:
            raise InvalidRequest(f"the native engine of this worker can't compute it: {error}") from error

    def page_format(self, config: ModelConfig) -> PageFormat:
        return PageFormat(config.layers, config.kv_heads, config.head_dim, PAGE_TOKENS, self._kv_dtype, "kv3")

    def pool(self, page_format: PageFormat, pages: int) -> NativePool:
        return NativePool(page_format, pages)

    def close(self) -> None:
        self._engine.close()


def _of(kind: type[M], model: Model | None) -> M | None:
    return model if isinstance(model, kind) else None
