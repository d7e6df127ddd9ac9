"""What the launcher and the other commands take from the environment."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from pdbus.settings import Settings


@dataclass(frozen=True, kw_only=True)
class StackSettings(Settings):
    nats_url: str = field(default="", metadata={"env": "NATS_URL"})
    """A running NATS server with JetStream to use; empty: the launcher brings its own."""
    nats_server_bin: Path | None = field(default=None, metadata={"env": "NATS_SERVER_BIN"})
    """The nats-server executable of the launcher's own server; absent: the one that is installed."""
    keys_file: Path | None = None
    """API keys of tenants, as `pdbus keys` writes them and routers read them; absent: keys.json of the data folder."""
    api_key: str | None = field(default=None, repr=False)
    """With which `pdbus chat` asks, where the routers have a keys file."""
    data: Path | None = None
    """The data folder; absent: the user's, as the operating system has it."""
    weight_cache: Path | None = None
    """Where workers keep weights that the host has had before; absent: in the data folder."""
