"""The times to the first token of one stack: cold, and warm from each tier."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import aiohttp

from loadtest.asking import Failed, one
from loadtest.prompts import Prompts
from loadtest.stack import Refused, Stack

SUFFIX_TOKENS = 16
_NEW_TOKENS = 2
_BACK_S = 90.0
_WRITE_BACK_S = 4.0
"""Pages go to the cache nodes behind the requests: how long that may take."""


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
            await asyncio.sleep(_WRITE_BACK_S)
            await stack.restart("prefill", "decode", *(["cache"] if tier == "L3" else []))
            await answering(http, stack, prompts, f"{labels[0]}/{tier}")
        if tier == "L3":
            drop_page_cache(stack.data)
        found += [await ask(http, stack, prompts, label, tokens, tier) for label in labels]
    return found


async def answering(http: aiohttp.ClientSession, stack: Stack, prompts: Prompts, label: str) -> None:
    """Waits until the new workers answer; their first answer, with what it warms up, is not measured."""
    prompt = prompts.draw(f"probe/{label}", 600)
    try:
        async with asyncio.timeout(_BACK_S):
            while True:
                with suppress(Failed):
                    await one(http, stack, prompt, _NEW_TOKENS)
                    return
                await asyncio.sleep(0.5)
    except TimeoutError:
        raise Refused(f"the new workers did not answer within {_BACK_S:g} s") from None


def drop_page_cache(folder: Path) -> None:
    """Makes the kernel forget what it keeps in memory of these files, so that they are read from the disk."""
    os.sync()
    for path in folder.rglob("*"):
        if path.is_file() and not path.is_symlink():
            with path.open("rb") as file:
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
