"""Which backend serves: the native kernels on a CPU that has what they need, else torch."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, TypeAlias

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


@dataclass(frozen=True)
class BackendOptions:
    """What a worker's settings ask for."""

    engine: EngineName = "auto"
    precision: Precision = "fp32"
    kv_dtype: KvDtype = "fp32"
    device: str = "cpu"
    threads: int = 1
    cores_file: Path | None = None


def open_backend(options: BackendOptions, config: ModelConfig) -> Backend:
    """Takes seconds where the kernels have to be compiled. `auto` falls back to torch, in fp32, and logs why.

    Raises InvalidRequest where just the native engine is wanted, and can't serve this model here."""
    if options.engine == "torch" or not options.device.startswith("cpu"):
        return _torch(options)
    try:
        check_supported(config)
        return NativeBackend(
            NativeEngine(options.threads, cores=options.cores_file), options.precision, options.kv_dtype
        )
    except NativeUnavailable as error:
        if options.engine == "native":
            raise InvalidRequest(f"the native engine can't serve here: {error}") from error
        precision = "" if options.precision == "fp32" else f", and in fp32 instead of {options.precision}"
        log.warning("torch computes%s, since the native engine can't serve here: %s", precision, error)
        return _torch(options)


def _torch(options: BackendOptions) -> Backend:
    # Only here: torch costs a worker that never computes with it 200 MB and seconds of its start.
    from pdbus.model.torch_backend import TorchBackend

    return TorchBackend(options.device, options.kv_dtype, options.threads)
