"""Settings of the workers that have an engine."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from pdbus.kv.format import PAGE_TOKENS
from pdbus.model.backends import EngineName, KvChoice, PrecisionChoice
from pdbus.runtime.cores import usable_cores
from pdbus.settings import Settings, SettingsError


@dataclass(frozen=True, kw_only=True)
class EngineSettings(Settings):
    kv_bytes: int = 1 << 30
    """Memory for KV pages. On the CPU a page takes memory once it is used."""
    kv_dtype: KvChoice = "auto"
    """Of KV on its whole way: pages, wire, cache tiers (kv/format.py)."""
    engine: EngineName = "auto"
    """auto: the native kernels where they can serve (a CPU with AVX2, and a C++ compiler for their first start), else
    torch."""
    precision: PrecisionChoice = "auto"
    """Of the weights that the native engine computes with: int8 or int4 with a scale per 32 inputs. Each worker makes
    them from the root in fp32 as it loads it. All workers of a stack should have the same."""
    threads: int = field(default_factory=usable_cores)
    """That compute one step: all cores that the process may use (its affinity and its container's CPU quota), unless
    told. Workers that share cores without a `cores_file`, containers on one machine say, want the cores divided by the
    workers: threads that wait for each other lose more than the cores they add."""
    cores_file: Path | None = None
    """A ledger (native/cores.py) in which the workers of one machine say when they compute. Each step of the native
    engine then takes its cores divided by the workers that compute just then, and follows changes from layer to layer;
    `threads` is for torch alone, which can't follow. `pdbus up` makes one for its workers."""
    weight_cache: Path | None = None
    """A folder for weights that this host has had before; its workers may share one, and `pdbus up` gives its workers
    one. Absent: none are kept beyond the versions that are loaded."""
    weight_cache_bytes: int = 4 << 30
    """What that folder may hold on disk: blocks in fp32 and packed layers, together about 5 bytes a
    parameter. It is never more than half of what the disk has free."""
    weight_bytes: int | None = None
    """Memory for weights. Below what the model takes, its layers are read from the cache folder as they are computed:
    as many stay in memory as fit. Absent: all of them stay."""
    layer_groups: int = 1
    """Equal runs of layers. With more than one, a page keeps what enters each but the lowest (in fp32, so pages take
    more of `kv_bytes`), and after an update of upper layers a cached prompt is computed again from there only."""
    chunk_tokens: int = 512
    """Prompt tokens in one step, over all requests."""
    most_running: int
    """Requests in the engine's steps at once; others wait."""
    device: str = "cpu"
    """As torch spells it: cpu, cuda, cuda:1."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.kv_bytes < 1:
            raise SettingsError("PDBUS_KV_BYTES must be above 0")
        if not 1 <= self.threads <= 1024:
            raise SettingsError(f"PDBUS_THREADS must be 1 to 1024, not {self.threads}")
        if self.precision in ("int8", "int4") and (self.engine == "torch" or not self.device.startswith("cpu")):
            raise SettingsError(
                f"PDBUS_PRECISION={self.precision} is for the native engine, on a CPU; torch is fp32 only"
            )
        if self.engine == "native" and not self.device.startswith("cpu"):
            raise SettingsError("PDBUS_ENGINE=native computes on a CPU only")
        if self.weight_cache_bytes < 0:
            raise SettingsError("PDBUS_WEIGHT_CACHE_BYTES must be 0 or above")
        if self.weight_bytes is not None and (self.weight_cache is None or not self.weight_cache_bytes):
            raise SettingsError("PDBUS_WEIGHT_BYTES needs a cache folder to read layers from: set PDBUS_WEIGHT_CACHE")
        if not 1 <= self.layer_groups <= 16:
            raise SettingsError(f"PDBUS_LAYER_GROUPS must be 1 to 16, not {self.layer_groups}")
        if self.weight_bytes is not None and self.layer_groups > 1:
            raise SettingsError("PDBUS_LAYER_GROUPS needs all weights in memory: leave PDBUS_WEIGHT_BYTES out")
        if self.most_running < 1:
            raise SettingsError("PDBUS_MOST_RUNNING must be at least 1")
        if self.chunk_tokens < PAGE_TOKENS:
            raise SettingsError(f"PDBUS_CHUNK_TOKENS must be at least a page, {PAGE_TOKENS}")
