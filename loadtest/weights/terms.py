"""What every section is told, and the stack that it measures."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import aiohttp

from loadtest.client import session
from loadtest.stack import Stack, stack
from pdbus.client.client import Client, connect


@dataclass(frozen=True, slots=True)
class Terms:
    model: Path
    up: tuple[str, ...] = ()
    """Further arguments of `pdbus up`."""
    short: bool = False
    """Fewer and shorter measurements: for a look, not for a figure."""
    verify: int = 6
    """Versions whose answers are computed again by a fresh engine."""


@dataclass(frozen=True)
class Subject:
    """A running stack, and the ways into it."""

    stack: Stack
    client: Client
    """Its weights, mostly."""
    http: aiohttp.ClientSession

    @property
    def url(self) -> str:
        return self.stack.url

    @property
    def model(self) -> str:
        return self.stack.model


@asynccontextmanager
async def subject(terms: Terms, *options: str, env: Mapping[str, str] | None = None) -> AsyncIterator[Subject]:
    """A stack of its own, as `pdbus up` makes it, ended with the scope."""
    async with (
        stack("--model", str(terms.model), *terms.up, *options, env=env) as running,
        connect(running.nats_url, running.model) as client,
        session() as http,
    ):
        yield Subject(running, client, http)
