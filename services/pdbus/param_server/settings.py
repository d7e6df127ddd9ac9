"""Settings of the param-server."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from pdbus.settings import Settings

SERVICE = "param_server"


@dataclass(frozen=True, kw_only=True)
class ParamServerSettings(Settings):
    data: Path = Path("data")
    """This server's own folder: no two processes may share one."""
    checkpoint: str | None = None
    """Directory, GGUF file or hub id. Without one the server holds copies of what others committed."""
    param_models: tuple[str, ...] = ()
    """The models whose weights this process serves (group.py); none named: PDBUS_MODEL alone."""
