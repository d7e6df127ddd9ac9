"""The ways in which the same requests are computed: each gives one answer a request, which must all be equal."""

from __future__ import annotations

import asyncio
import tempfile
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from loadtest.invariance.engine import Answer, Engine, Running
from loadtest.invariance.tiers import through_disk, through_memory
from pdbus.engine.sequence import Sequence as EngineSequence
from pdbus.kv.codec import export_layer, export_page, import_layer, import_page
from pdbus.kv.swap_file import SwapFile, Swapped
from pdbus.messages.common import Digest

LARGE_CHUNK, SMALL_CHUNK = 512, 16

Prompts = Sequence[Sequence[int]]
Found = tuple[str, list[Answer], bool]
"""Name of a way, its answers, and whether what it is for took place at all."""


@dataclass(frozen=True)
class Ways:
    engine: Engine
    prompts: Prompts
    new_tokens: int

    async def all(self) -> list[Found]:
        """The first is what the others are held against: alone, in large chunks, nothing cached."""
        found: list[Found] = [("alone, chunks of 512", await self._alone(LARGE_CHUNK), True)]
        others = len(self.prompts) - 1
        found.append((f"among {others} others, chunks of 512", await self._together(LARGE_CHUNK), True))
        found.append(("alone, chunks of 16", await self._alone(SMALL_CHUNK), True))
        found.append((f"among {others} others, chunks of 16", await self._together(SMALL_CHUNK), True))
        found += await self._cached()
        found.append(("handed over, then among others", await self._handed_over(), True))
        found.append(await self._preempted())
        return found

    async def _alone(self, chunk_tokens: int) -> list[Answer]:
        async with self.engine.running(self._pages(), chunk_tokens) as running:
            return [await running.answer(running.sequence(prompt, self.new_tokens)) for prompt in self.prompts]

    async def _together(self, chunk_tokens: int) -> list[Answer]:
        async with self.engine.running(self._pages(), chunk_tokens) as running:
            asked = [running.sequence(prompt, self.new_tokens) for prompt in self.prompts]
            return await asyncio.gather(*map(running.answer, asked))

    async def _cached(self) -> list[Found]:
        async with self.engine.running(self._pages(), LARGE_CHUNK) as running:
            for prompt in self.prompts:
                await running.answer(running.sequence(prompt, 1, keys=self.engine.keys(prompt)))
            again = [
                running.sequence(prompt, self.new_tokens, keys=self.engine.keys(prompt)) for prompt in self.prompts
            ]
            shared = [await running.answer(one) for one in again]
            pages = await self._exported(running)
        found = [("prefix from L1, the worker's own pages", shared)]
        found.append(("prefix from L2, a node's memory", await self._filled(through_memory(pages))))
        with tempfile.TemporaryDirectory(prefix="pdbus-load-") as folder:
            found.append(("prefix from L3, a node's disk", await self._filled(through_disk(pages, Path(folder)))))
        return [(name, answers, all(one.cached_tokens for one in answers)) for name, answers in found]

    async def _exported(self, running: Running) -> dict[Digest, bytes]:
        """All full pages of the prompts, as write-back takes them from the pool."""
        pages = {}
        for prompt in self.prompts:
            keys = self.engine.keys(prompt)
            hold = running.core.pages.hold()
            await running.core.call(partial(hold.match, keys))
            for key, page in zip(keys, hold.pages, strict=True):
                pages[key.digest] = bytes(export_page(running.pool, page))
            await running.core.call(hold.release)
        return pages

    async def _filled(self, pages: dict[Digest, bytes]) -> list[Answer]:
        """The prompts' full pages are written into those of a sequence that waits for them, as PrefixTier does."""
        size = self.engine.page_format.page_tokens
        async with self.engine.running(self._pages(), LARGE_CHUNK) as running:
            answers = []
            for prompt in self.prompts:
                wanted = self.engine.keys(prompt)[: (len(prompt) - 1) // size]
                values = [pages[key.digest] for key in wanted]
                answer = await running.answer(
                    running.sequence(prompt, self.new_tokens, ready=False), _fill(running, values)
                )
                answer.cached_tokens = len(values) * size
                answers.append(answer)
            return answers

    async def _handed_over(self) -> list[Answer]:
        """Each prompt is computed at one engine; its pages go layer by layer to another, where all answers run at
        once."""
        engine = self.engine
        async with (
            engine.running(self._pages(), LARGE_CHUNK) as prefill,
            engine.running(self._pages(), LARGE_CHUNK) as decode,
        ):
            firsts, arrived = [], []
            for prompt in self.prompts:
                sent = prefill.sequence(prompt, self.new_tokens, handoff=True)
                first = await prefill.answer(sent)
                hold = decode.core.pages.hold()
                pages = sent.hold.pages
                await decode.core.call(partial(hold.allocate, len(pages)))
                for layer in range(engine.page_format.layers):
                    import_layer(decode.pool, layer, hold.pages, export_layer(prefill.pool, layer, pages))
                await prefill.core.discard(sent)
                firsts.append(first)
                arrived.append(
                    decode.sequence(prompt, self.new_tokens, hold=hold, sampled=tuple(first.ids), computed=len(prompt))
                )
            rests = await asyncio.gather(*map(decode.answer, arrived))
        return [Answer(f.ids + r.ids, f.logits + r.logits) for f, r in zip(firsts, rests, strict=True)]

    async def _preempted(self) -> Found:
        """Two at a time in a pool with room for their prompts and hardly more: the first one that fills its last page
        sends the other into the swap file."""
        page_format, answers, swapped = self.engine.page_format, [], 0
        for at in range(0, len(self.prompts), 2):
            pair = self.prompts[at : at + 2]
            pages = sum(page_format.pages_for(len(prompt) + 1) for prompt in pair)
            with _CountingSwap(None, pages * page_format.page_bytes, page_format.page_bytes) as swap:
                async with self.engine.running(pages, LARGE_CHUNK, swap) as running:
                    asked = [running.sequence(prompt, self.new_tokens) for prompt in pair]
                    both = threading.Event()
                    running.core.post(both.wait)  # else one may be over before the other is there
                    answering = asyncio.gather(*map(running.answer, asked))
                    await asyncio.sleep(0)
                    both.set()
                    answers += await answering
                swapped += swap.saved
        return "preempted, and back from the swap file", answers, swapped > 0

    def _pages(self) -> int:
        """Enough for all at once, each with a page to spare."""
        pages_for = self.engine.page_format.pages_for
        return sum(pages_for(len(prompt) + self.new_tokens) + 1 for prompt in self.prompts)


class _CountingSwap(SwapFile):
    saved = 0

    def save(self, body: memoryview) -> Swapped | None:
        self.saved += 1
        return super().save(body)


def _fill(running: Running, values: Sequence[bytes]) -> Callable[[EngineSequence], None]:
    def fill(sequence: EngineSequence) -> None:
        for page, value in zip(sequence.hold.pages, values, strict=False):
            import_page(running.pool, page, value)
        running.core.resume(sequence, len(values) * running.pool.format.page_tokens)

    return fill
