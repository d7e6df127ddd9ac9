"""The backend of the native kernels. No torch here."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Literal, TypeAlias

from pdbus.errors import InvalidRequest
from pdbus.kv.format import PAGE_TOKENS, KvDtype, PageFormat
from pdbus.messages.common import Digest
from pdbus.model.backend import Backend, Model
from pdbus.model.config import ModelConfig
from pdbus.model.native_build import NativeBuilder
from pdbus.model.native_llama import NativeLlama
from pdbus.model.native_llama import Precision as Scheme
from pdbus.model.native_pool import NativePool
from pdbus.native.build import NativeUnavailable, kernel_version
from pdbus.native.library import NativeEngine

Precision: TypeAlias = Literal["fp32", "int8", "int4"]
"""Of the weights that a worker computes with. It quantises them itself, from a root in fp32, as it loads them."""

_SCHEMES: dict[Precision, Scheme] = {"fp32": "fp32", "int8": "int8-groups", "int4": "int4-groups"}


class NativeBackend(Backend):
    """Owns the engine: its threads end with `close`."""

    def __init__(self, engine: NativeEngine, precision: Precision, kv_dtype: KvDtype) -> None:
        self.compute_class = compute_class(_SCHEMES[precision], kv_dtype)
        self.takes_int8 = precision == "int8"
        self._engine, self._scheme, self._kv_dtype = engine, _SCHEMES[precision], kv_dtype

    def begin(
        self,
        config: ModelConfig,
        digests: Mapping[str, Digest],
        reuse: Model | None,
        packed: Mapping[str, str] = MappingProxyType({}),
    ) -> NativeBuilder:
        old = reuse if isinstance(reuse, NativeLlama) else None
        try:
            return NativeBuilder(config, digests, self._engine, self._scheme, old, packed)
        except NativeUnavailable as error:
            raise InvalidRequest(f"the native engine of this worker can't compute it: {error}") from error

    def page_format(self, config: ModelConfig) -> PageFormat:
        return PageFormat(config.layers, config.kv_heads, config.head_dim, PAGE_TOKENS, self._kv_dtype, "kv3")

    def pool(self, page_format: PageFormat, pages: int) -> NativePool:
        return NativePool(page_format, pages)

    def close(self) -> None:
        self._engine.close()


def compute_class(scheme: Scheme, kv_dtype: KvDtype) -> str:
    """What numbers depend on besides weights, as part of prefix and result keys.

    The kernels give the same bits with every instruction set, so that it isn't named."""
    return f"cpu/native-{kernel_version()}/w-{scheme}/kv-{kv_dtype}"
