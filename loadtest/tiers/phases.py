"""The times to the first token of one stack: cold, and warm from each tier."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import aiohttp

from loadtest.asking import Failed, one
from loadtest.prompts import Prompts
from loadtest.stack import Refused, Stack
from pdbus.bus.bus import connect
from pdbus.bus.presence import Fleet

SUFFIX_TOKENS = 16
_NEW_TOKENS = 2
_BACK_S = 90.0
_LOOK_S = 0.5
_SETTLED_S = 3.0
"""Pages go to the cache nodes behind the requests: so long without another one, and they are all there."""
_SETTLE_S = 60.0


@dataclass(frozen=True, slots=True)
class Sample:
    """One answer."""

    tier: str
    first_ms: float
    cached_tokens: int


async def ask(
    http: aiohttp.ClientSession, stack: Stack, prompts: Prompts, label: str, tokens: int, tier: str
) -> Sample:
    """The prefix of `tokens` that the label names, and an end that no other prompt has."""
    prompt = prompts.draw(label, tokens) + prompts.draw(f"{label}/{tier}", SUFFIX_TOKENS)
    answer = await one(http, stack, prompt, _NEW_TOKENS)
    return Sample(tier, (answer.ttft_s or 0.0) * 1e3, answer.cached_tokens)


async def phases(
    http: aiohttp.ClientSession, stack: Stack, prompts: Prompts, labels: Sequence[str], tokens: int
) -> list[Sample]:
    """Each prefix cold, then from L1, from L2 once the workers are new, from L3 once the cache nodes are too."""
    found = []
    for tier in ("cold", "L1", "L2", "L3"):
        if tier in ("L2", "L3"):
            await _settled(stack)
            await stack.restart("prefill", "decode", *(["cache"] if tier == "L3" else []))
            await answering(http, stack, prompts, f"{labels[0]}/{tier}")
            await _settled(stack)
        if tier == "L3":
            drop_page_cache(stack.data)
        found += [await ask(http, stack, prompts, label, tokens, tier) for label in labels]
    return found


async def _settled(stack: Stack) -> None:
    """Waits until the cache nodes get nothing more. Raises Refused where that takes too long."""
    async with connect(stack.nats_url, name="loadtest tiers") as bus, Fleet(bus) as fleet:
        began_s = since_s = time.monotonic()
        held = -1
        while time.monotonic() - since_s < _SETTLED_S:
            now = sum(card.load.bytes_used for card in fleet.live("cache"))
            if now != held:
                held, since_s = now, time.monotonic()
            if since_s > began_s + _SETTLE_S:
                raise Refused(f"the workers still wrote to cache nodes after {_SETTLE_S:g} s")
            await asyncio.sleep(_LOOK_S)


async def answering(http: aiohttp.ClientSession, stack: Stack, prompts: Prompts, label: str) -> None:
    """Waits until the new workers answer; their first answer, with what it warms up, is not measured."""
    prompt = prompts.draw(f"probe/{label}", 600)
    try:
        async with asyncio.timeout(_BACK_S):
            while True:
                with suppress(Failed):
                    await one(http, stack, prompt, _NEW_TOKENS)
                    return
                await asyncio.sleep(_LOOK_S)
    except TimeoutError:
        raise Refused(f"the new workers did not answer within {_BACK_S:g} s") from None


def drop_page_cache(folder: Path) -> None:
    """Makes the kernel forget what it keeps in memory of these files, so that they are read from the disk."""
    os.sync()
    for path in folder.rglob("*"):
        if path.is_file() and not path.is_symlink():
            with path.open("rb") as file:
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
