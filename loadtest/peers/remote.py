"""The comparison's side of an engine's process."""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from loadtest.peers.base import Prompts, Sources, Timing, Unusable, Weights

_PREPARE_S = 900.0
_LOAD_S = 180.0
_ANSWER_S = 300.0
_END_S = 10.0
_LINE_BYTES = 1 << 20


@dataclass
class Remote:
    """A running engine."""

    process: asyncio.subprocess.Process
    weights: Weights
    peak_bytes: int

    async def generate(self, prompts: Prompts, new_tokens: int) -> Timing:
        """Raises Unusable where the engine fails or takes too long."""
        asked = {"prompts": [list(prompt) for prompt in prompts], "new_tokens": new_tokens}
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps(asked).encode() + b"\n")
        reply = await _reply(self.process, _ANSWER_S)
        self.peak_bytes = reply.pop("peak_bytes")
        return Timing(**reply | {"ids": tuple(reply["ids"])})


async def prepare(python: str, name: str, sources: Sources) -> Path:
    """Converts the weights for an engine, in a process of its own. Raises Unusable with the reason."""
    async with _process(python, "prepare", name, sources) as process:
        return Path((await _reply(process, _PREPARE_S))["path"])


@asynccontextmanager
async def serving(python: str, name: str, sources: Sources, path: Path, threads: int) -> AsyncIterator[Remote]:
    """An engine, loaded. Raises Unusable with the reason."""
    options = ("--path", str(path), "--threads", str(threads))
    # Some take the number of threads from nowhere else.
    env = os.environ | {"OMP_NUM_THREADS": str(threads)}
    async with _process(python, "serve", name, sources, options, env) as process:
        ready = await _reply(process, _LOAD_S)
        yield Remote(process, Weights(**ready["weights"]), ready["peak_bytes"])


@asynccontextmanager
async def _process(
    python: str,
    what: str,
    name: str,
    sources: Sources,
    options: Sequence[str] = (),
    env: Mapping[str, str] | None = None,
) -> AsyncIterator[asyncio.subprocess.Process]:
    argv = [python, "-m", "loadtest.peers", what, name, "--folder", str(sources.folder), "--cache", str(sources.cache)]
    argv += ["--gguf", str(sources.gguf)] if sources.gguf else []
    pipe, nothing = asyncio.subprocess.PIPE, asyncio.subprocess.DEVNULL
    process = await asyncio.create_subprocess_exec(
        *argv, *options, stdin=pipe, stdout=pipe, stderr=nothing, limit=_LINE_BYTES, env=env
    )
    try:
        yield process
    finally:
        assert process.stdin is not None
        process.stdin.close()
        with suppress(TimeoutError):
            async with asyncio.timeout(_END_S):
                await process.wait()
        if process.returncode is None:
            process.kill()
        await process.wait()


async def _reply(process: asyncio.subprocess.Process, timeout_s: float) -> dict[str, Any]:
    assert process.stdout is not None
    try:
        async with asyncio.timeout(timeout_s):
            line = await process.stdout.readline()
    except TimeoutError:
        process.kill()
        raise Unusable(f"no answer within {timeout_s:g} s") from None
    if not line:
        raise Unusable(f"its process ended with {await process.wait()}")
    reply: dict[str, Any] = json.loads(line)
    if "unusable" in reply:
        raise Unusable(reply["unusable"])
    return reply
