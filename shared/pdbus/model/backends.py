"""Which backend serves: the native kernels on a CPU that has what they need, else torch."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, TypeAlias

from pdbus.caching.cache_folder import CacheFolder
from pdbus.errors import InvalidRequest
from pdbus.kv.format import KvDtype
from pdbus.model.backend import Backend
from pdbus.model.config import ModelConfig
from pdbus.model.native_backend import NativeBackend, Precision
from pdbus.model.native_build import check_supported
from pdbus.native.build import NativeUnavailable
from pdbus.native.library import NativeEngine

log = logging.getLogger(__name__)

EngineName: TypeAlias = Literal["auto", "native", "torch"]
PrecisionChoice: TypeAlias = Literal["auto", Precision]
"""auto: int8 where the native engine serves, else fp32. `python -m loadtest quality` measures what that costs."""
KvChoice: TypeAlias = Literal["auto", KvDtype]
"""auto: exact beside exact weights, int8 beside others."""


@dataclass(frozen=True)
class BackendOptions:
    """What a worker's settings ask for."""

    engine: EngineName = "auto"
    precision: PrecisionChoice = "auto"
    kv_dtype: KvChoice = "auto"
    device: str = "cpu"
    threads: int = 1
    cores_file: Path | None = None
    folder: CacheFolder | None = None
    """Where packed weights are kept."""
    weight_bytes: int | None = None
    """Memory for weights; None: all of them stay there."""
    layer_groups: int = 1


def open_backend(options: BackendOptions, config: ModelConfig) -> Backend:
    """Takes seconds where the kernels have to be compiled. `auto` falls back to torch, in fp32, and logs why.

    Raises InvalidRequest where just the native engine is wanted, and can't serve this model here."""
    backend = _open(options, config)
    log.info("computing as %s", backend.compute_class)
    return backend


def _open(options: BackendOptions, config: ModelConfig) -> Backend:
    exact_kv: KvDtype = "fp32" if options.kv_dtype == "auto" else options.kv_dtype
    if options.engine == "torch" or not options.device.startswith("cpu"):
        return _torch(options, exact_kv)
    precision: Precision = "int8" if options.precision == "auto" else options.precision
    kv_dtype: KvDtype = "int8" if options.kv_dtype == "auto" and precision != "fp32" else exact_kv
    try:
        check_supported(config)
        engine = NativeEngine(options.threads, cores=options.cores_file)
        return NativeBackend(
            engine, precision, kv_dtype, options.folder, options.weight_bytes, layer_groups=options.layer_groups
        )
    except NativeUnavailable as error:
        if options.engine == "native":
            raise InvalidRequest(f"the native engine can't serve here: {error}") from error
        instead = "" if precision == "fp32" else f", and in fp32 instead of {precision}"
        log.warning("torch computes%s, since the native engine can't serve here: %s", instead, error)
        return _torch(options, exact_kv)


def _torch(options: BackendOptions, kv_dtype: KvDtype) -> Backend:
    # Only here: torch costs a worker that never computes with it 200 MB and seconds of its start.
    from pdbus.model.torch_backend import TorchBackend

    groups = options.layer_groups
    return TorchBackend(
        options.device, kv_dtype, options.threads, options.folder, options.weight_bytes, layer_groups=groups
    )
