"""What a local stack consists of: the processes and their settings, decided before anything starts. Pure."""

from __future__ import annotations

import sys
from dataclasses import dataclass, field
from pathlib import Path

from pdbus.errors import InvalidRequest
from pdbus.stack.folder import Folder
from pdbus.stack.nats_accounts import seed_path
from pdbus.stack.settings import StackSettings

STOP_ORDER = (("router", "invalidator"), ("prefill", "decode"), ("cache", "param_server"))
"""Who is stopped together: first those that others' work comes from, last those that it rests on."""


FEW_CORES = 2
"""With no more, prefill and decode apart only take turns on them, and the hand-over comes on top: colocated workers
were faster in all that was measured there (README, Figures)."""


@dataclass(frozen=True)
class Options:
    """What `pdbus up` was asked for."""

    checkpoint: str
    """Directory, GGUF file or hub id."""
    model: str
    """Its name in requests; empty: as the checkpoint suggests."""
    host: str = "127.0.0.1"
    port: int = 8000
    """Of the first router; 0: a free one. Further routers take free ones."""
    precision: str = ""
    """Of the weights that workers compute with; empty: as the environment says, or auto."""
    kv_dtype: str = ""
    """Of the KV cache; likewise."""
    routers: int = 1
    param_servers: int = 1
    cache_nodes: int = 1
    invalidators: int = 1
    prefill: int = 1
    decode: int = 1
    colocated: bool = False
    """Decode workers read all prompts themselves, and there are no prefill workers."""
    secure: bool = False
    """The launcher's own NATS server lets in only who has a key of the data folder, for what its kind needs."""
    embeds: bool = False
    """The checkpoint is an encoder: there is nothing to decode, colocated or not."""


@dataclass(frozen=True)
class ProcessPlan:
    """One child process: `python -m pdbus.<service>` with its settings in the environment."""

    service: str
    id: str
    settings: dict[str, str] = field(default_factory=dict)

    @property
    def command(self) -> list[str]:
        return [sys.executable, "-m", f"pdbus.{self.service}"]


def keys_file(folder: Folder, settings: StackSettings) -> Path | None:
    """By which the routers know who asks; None: they ask for no key."""
    return settings.keys_file or (folder.keys_file if folder.keys_file.exists() else None)


def processes(
    options: Options,
    folder: Folder,
    nats_url: str,
    cores: int,
    cores_file: str | None = None,
    settings: StackSettings | None = None,
) -> list[ProcessPlan]:
    """Every service process of the stack. Engine processes share the cores: by the ledger `cores_file` those that
    compute just then, without one, or where torch computes, each as many. Files that the `settings` name stand before
    those of the data folder."""
    named = settings or StackSettings()
    keys = keys_file(folder, named)
    weight_cache = named.weight_cache or folder.of_model(options.model) / "weights"
    prefill = 0 if options.colocated and not options.embeds else options.prefill
    decode = 0 if options.embeds else options.decode
    threads = max(1, cores // (prefill + decode))

    def plan(service: str, number: int, **more: str) -> ProcessPlan:
        id = f"{service.replace('_', '-')}-{number}"
        common = {
            "NATS_URL": nats_url,
            "PDBUS_ID": id,
            "PDBUS_MODEL": options.model,
            "PDBUS_DATA": str(folder.of_model(options.model) / id),
            # numpy's and torch's BLAS make a thread per core in each process where nothing tells them otherwise.
            "OMP_NUM_THREADS": "1",
        }
        if options.secure:
            common["PDBUS_NATS_SEED"] = str(seed_path(folder.nats_keys, service))
        return ProcessPlan(service, id, {**common, **more})

    def router(number: int) -> ProcessPlan:
        port = options.port if number == 1 else 0
        named_keys = {"PDBUS_KEYS_FILE": str(keys)} if keys else {}
        return plan("router", number, PDBUS_HTTP_HOST=options.host, PDBUS_HTTP_PORT=str(port), **named_keys)

    checkpoint = {"PDBUS_CHECKPOINT": options.checkpoint}
    engine = {
        "PDBUS_THREADS": str(threads),
        "OMP_NUM_THREADS": str(threads),
        "PDBUS_WEIGHT_CACHE": str(weight_cache),
    }
    given = {
        "PDBUS_CORES_FILE": cores_file,
        "PDBUS_PRECISION": options.precision,
        "PDBUS_KV_DTYPE": options.kv_dtype,
    }
    engine |= {name: value for name, value in given.items() if value}
    counted: tuple[tuple[str, int, dict[str, str]], ...] = (
        ("param_server", options.param_servers, checkpoint),
        ("prefill", prefill, engine),
        ("decode", decode, engine | ({"PDBUS_COLOCATED": "1"} if options.colocated else {})),
        ("cache", options.cache_nodes, {}),
        ("invalidator", options.invalidators, {}),
    )
    return [plan(service, n, **more) for service, count, more in counted for n in range(1, count + 1)] + [
        router(n) for n in range(1, options.routers + 1)
    ]


def layout(prefill: int | None, colocated: bool, cores: int) -> tuple[int, bool]:
    """How many prefill workers, and whether decode workers read all prompts instead; `prefill`: None where not asked.

    Raises InvalidRequest where both are asked for."""
    if colocated and prefill is not None:
        raise InvalidRequest("--colocated has no prefill workers: leave --prefill out")
    return prefill or 1, colocated or (prefill is None and cores <= FEW_CORES)


def resolve_checkpoint(model: str) -> str:
    """A path made absolute, so that it means the same to every child; a hub id as it is."""
    path = Path(model).expanduser()
    return str(path.resolve()) if path.exists() else model
