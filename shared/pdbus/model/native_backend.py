"""The backend of the native kernels. No torch here."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Literal, TypeAlias

from pdbus.caching.cache_folder import CacheFolder
from pdbus.errors import InvalidRequest
from pdbus.kv.format import NO_STREAMS, PAGE_TOKENS, KvDtype, PageFormat, StreamFormat
from pdbus.messages.common import Digest
from pdbus.model.backend import Backend, Builder, Model
from pdbus.model.config import ModelConfig
from pdbus.model.native_build import NativeBuilder, check_supported, head_source_of
from pdbus.model.native_llama import NativeLlama
from pdbus.model.native_llama import Precision as Scheme
from pdbus.model.native_pool import NativePool
from pdbus.model.native_streamed import NativeForm, StreamedNative
from pdbus.model.parts import NO_CHANGES, NO_TENSORS, Changes, Tensors, packed_dtypes
from pdbus.model.piece_keys import PieceKeys
from pdbus.model.residency import Residency
from pdbus.model.shelf import Shelf
from pdbus.model.streamed_build import StreamedBuilder
from pdbus.native.build import NativeUnavailable, kernel_version
from pdbus.native.library import NativeEngine

Precision: TypeAlias = Literal["fp32", "int8", "int4"]
"""Of the weights that a worker computes with. It quantises them itself, from a root in fp32, as it loads them."""

_SCHEMES: dict[Precision, Scheme] = {"fp32": "fp32", "int8": "int8-groups", "int4": "int4-groups"}


class NativeBackend(Backend):
    """Owns the engine: its threads end with `close`."""

    def __init__(
        self,
        engine: NativeEngine,
        precision: Precision,
        kv_dtype: KvDtype,
        folder: CacheFolder | None = None,
        weight_bytes: int | None = None,
        *,
        layer_groups: int = 1,
    ) -> None:
        """`folder`: where packed layers are kept. `weight_bytes`: memory for weights, of a model that is read from
        there as it computes."""
        self.layer_groups = layer_groups
        self.compute_class = compute_class(_SCHEMES[precision], kv_dtype)
        self.takes_int8 = precision == "int8"
        self._engine, self._scheme, self._kv_dtype = engine, _SCHEMES[precision], kv_dtype
        self._shelf = Shelf(folder, self._scheme) if folder else None
        self._residency = Residency(weight_bytes) if weight_bytes is not None else None

    def begin(
        self,
        config: ModelConfig,
        digests: Mapping[str, Digest],
        reuse: Model | None,
        changes: Changes = NO_CHANGES,
        tensors: Tensors = NO_TENSORS,
    ) -> Builder[NativeLlama | StreamedNative]:
        packed = packed_dtypes(tensors)
        source = head_source_of(config, self._scheme, packed)
        keys = partial(PieceKeys, config=config, digests=digests, tensors=tensors, head_source=source)
        try:
            if self._shelf and self._residency:
                check_supported(config)
                form = NativeForm(config, self._engine, self._scheme, self._residency)
                pieces = reuse.pieces if isinstance(reuse, StreamedNative) and reuse.config == config else None
                return StreamedBuilder(form, self._residency, keys(self._shelf), pieces, changes)
            old = reuse if isinstance(reuse, NativeLlama) else None
            known = keys(self._shelf) if self._shelf and tensors else None
            return NativeBuilder(config, digests, self._engine, self._scheme, old, changes, known, packed)
        except NativeUnavailable as error:
            raise InvalidRequest(f"the native engine of this worker can't compute it: {error}") from error

    def page_format(self, config: ModelConfig) -> PageFormat:
        return PageFormat(config.layers, config.kv_heads, config.head_dim, PAGE_TOKENS, self._kv_dtype, "kv3")

    def pool(self, page_format: PageFormat, pages: int, streams: StreamFormat = NO_STREAMS) -> NativePool:
        return NativePool(page_format, pages, streams)

    def close(self) -> None:
        self._engine.close()


def compute_class(scheme: Scheme, kv_dtype: KvDtype) -> str:
    """What numbers depend on besides weights, as part of prefix and result keys.

    The kernels give the same bits with every instruction set, so that it isn't named."""
    return f"cpu/native-{kernel_version()}/w-{scheme}/kv-{kv_dtype}"
