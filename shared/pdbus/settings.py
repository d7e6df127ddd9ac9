"""Settings: the environment, read once at start into a frozen dataclass. Nothing else reads the environment.

A service declares its own dataclass that extends `Settings`; each field `pool_bytes` is read from `PDBUS_POOL_BYTES`.
`NATS_URL` and the OpenTelemetry variables keep the names that the field uses.
"""

from __future__ import annotations

import dataclasses
import os
import platform
import re
import types
import typing
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, TypeVar

from pdbus.context import new_id
from pdbus.errors import InvalidRequest
from pdbus.nats_access import NatsAccess

T = TypeVar("T", bound="Settings")


class SettingsError(InvalidRequest):
    """A variable of the environment can't be used; the message names it."""


@dataclass(frozen=True, kw_only=True)
class Settings:
    """What every service needs."""

    nats_url: str = field(default="nats://127.0.0.1:4222", metadata={"env": "NATS_URL"})
    nats_seed: Path | None = None
    """A file with this process's NKey seed (`pdbus keys nats` makes one for each kind). Absent: the server is open."""
    nats_creds: Path | None = None
    """A NATS credentials file (JWT and seed) instead, where the server has an operator of its own."""
    nats_ca: Path | None = None
    """Certificates that must have signed the server's: the connection then is by TLS or not at all."""
    nats_cert: Path | None = None
    """This process's certificate, where the server wants one; with `nats_key`."""
    nats_key: Path | None = None
    model: str = "smollm2-135m-instruct"
    """The model's name on the bus and in HTTP requests."""
    id: str = field(default_factory=lambda: f"{_token(platform.node())}-{new_id()[:8]}")
    """This process's name on the bus. The launcher numbers them; in a container it is made from the host name."""
    log_level: str = "INFO"
    log_format: Literal["text", "json"] = "text"
    otlp_endpoint: str | None = field(default=None, metadata={"env": "OTEL_EXPORTER_OTLP_ENDPOINT"})
    metrics_exporter: Literal["otlp", "none"] = field(default="otlp", metadata={"env": "OTEL_METRICS_EXPORTER"})
    """Whether metrics go to the OTLP endpoint too; "none" for a collector that takes only traces, as Jaeger does."""
    drain_s: float = 10.0
    """How long running work may take to finish after SIGTERM."""
    slots: Path | None = None
    """A folder that equal processes share: each takes its id and data folder from it (runtime/slots.py)."""
    history: Path | None = None
    """A folder into which each process writes what it admitted, pinned, read and stored, for the consistency checker
    (recording.py); absent: nothing is recorded."""
    lifeline_fd: int | None = None
    """The end of a pipe that the launcher gave this process: when it breaks, the process ends (runtime/lifeline.py)."""

    def __post_init__(self) -> None:
        if not re.fullmatch(r"[A-Za-z0-9_-]{1,64}", self.id):
            raise SettingsError(f"PDBUS_ID must be 1 to 64 characters of A-Z a-z 0-9 _ -, not {self.id!r}")
        if not self.model or len(self.model) > 128:
            raise SettingsError("PDBUS_MODEL must be a name of 1 to 128 characters")
        if self.nats_seed is not None and self.nats_creds is not None:
            raise SettingsError("PDBUS_NATS_SEED and PDBUS_NATS_CREDS are two ways of the same: set one")
        if (self.nats_cert is None) != (self.nats_key is None):
            raise SettingsError("PDBUS_NATS_CERT and PDBUS_NATS_KEY go together")

    @property
    def nats_access(self) -> NatsAccess:
        """How this process shows NATS who it is."""
        return NatsAccess(
            seed=self.nats_seed, creds=self.nats_creds, ca=self.nats_ca, cert=self.nats_cert, key=self.nats_key
        )


def load(cls: type[T], environ: Mapping[str, str] | None = None, over: Mapping[str, str] | None = None) -> T:
    """Reads `cls` from the environment, with the variables `over` it.

    Raises SettingsError that names the variable and what it may hold."""
    environ = {**(os.environ if environ is None else environ), **(over or {})}
    hints = typing.get_type_hints(cls)
    values: dict[str, Any] = {}
    for item in dataclasses.fields(cls):
        name = item.metadata.get("env", f"PDBUS_{item.name.upper()}")
        text = environ.get(name)
        if text is not None and text != "":
            values[item.name] = _parse(name, text, hints[item.name])
    return cls(**values)


def _parse(name: str, text: str, hint: Any) -> Any:
    if isinstance(hint, types.UnionType):  # `X | None`: an empty variable counts as absent
        hint = next(part for part in typing.get_args(hint) if part is not types.NoneType)
    if typing.get_origin(hint) is tuple:
        return tuple(part.strip() for part in text.split(",") if part.strip())
    if typing.get_origin(hint) is Literal:
        if text not in typing.get_args(hint):
            raise SettingsError(f"{name} must be one of {', '.join(typing.get_args(hint))}, not {text!r}")
        return text
    if hint is bool:
        if text.lower() in {"1", "true", "yes", "on"}:
            return True
        if text.lower() in {"0", "false", "no", "off"}:
            return False
        raise SettingsError(f"{name} must be true or false, not {text!r}")
    if hint not in (str, int, float, Path):
        raise TypeError(f"settings field for {name} has an unsupported type {hint!r}")
    try:
        return hint(text)
    except ValueError:
        raise SettingsError(f"{name} must be a number ({hint.__name__}), not {text!r}") from None


def _token(name: str) -> str:
    return re.sub(r"[^A-Za-z0-9_-]", "-", name)[:40] or "host"
