"""A NATS server behind the proxy that cuts single processes off from it."""

from __future__ import annotations

import subprocess
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

from loadtest.proxied import proxied
from pdbus.stack.child import Inherited
from pdbus.stack.launcher import lifeline_pipe
from pdbus.stack.nats_child import own_nats


@dataclass(frozen=True)
class CutNats:
    url: str
    """Of the server itself: for who is never cut off."""
    cut_url: str
    """Of the proxy before it."""
    proxy: subprocess.Popen[str]
    """Is told `cut ID` and `mend ID`."""


@asynccontextmanager
async def cut_nats(folder: Path, on_start: Callable[[int], None] = lambda pid: None) -> AsyncIterator[CutNats]:
    """The server is started again should it die; `on_start` gets each process id."""
    with lifeline_pipe() as lifeline:
        async with own_nats(folder, None, Inherited(lifeline, lifeline), on_start, lambda what: None) as url:
            with proxied("loadtest.chaos.proxy", url) as (cut_url, proxy):
                yield CutNats(url, cut_url, proxy)
