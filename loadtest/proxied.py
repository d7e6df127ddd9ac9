"""Proxies in front of a NATS server, each a process of its own that is told what to do line by line."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from urllib.parse import urlsplit


@contextmanager
def proxied(module: str, nats_url: str, *arguments: str) -> Iterator[tuple[str, subprocess.Popen[str]]]:
    """The URL of `python -m MODULE HOST:PORT ARGUMENTS…` in front of the server, and its process; killed in the end."""
    at = urlsplit(nats_url)
    command = [sys.executable, "-m", module, f"{at.hostname}:{at.port}", *arguments]
    proxy = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    try:
        assert proxy.stdout
        yield f"nats://127.0.0.1:{int(proxy.stdout.readline())}", proxy
    finally:
        proxy.kill()
        proxy.communicate()


def tell(proxy: subprocess.Popen[str], line: str) -> None:
    """Has the proxy `take` the line."""
    assert proxy.stdin
    proxy.stdin.write(line + "\n")
    proxy.stdin.flush()


async def obey(server: asyncio.Server, take: Callable[[str], None]) -> None:
    """The proxy's own side: tells its port, and gives `take` each line of its input until that ends."""
    print(server.sockets[0].getsockname()[1], flush=True)
    commands, loop = asyncio.StreamReader(), asyncio.get_running_loop()
    await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(commands), sys.stdin)
    while line := await commands.readline():
        take(line.decode())
    server.close()
