"""A router that only asks workers and listens to them."""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from pdbus.bus.bus import Bus
from pdbus.context import RequestContext
from pdbus.errors import PdbusError
from pdbus.messages.common import Sampling, Ticket
from pdbus.messages.decode import DecodeRun
from pdbus.messages.prefill import PrefillRun
from pdbus.messages.router import TokenFrame, TokenItem
from pdbus.messages.workers import Accepted, Cancel, CancelReason
from pdbus.subjects import CANCEL, DECODE_RUN, PREFILL_RUN


@dataclass
class Router:
    """Asks for attempts, and keeps every item that comes by session and attempt."""

    bus: Bus
    id: str
    model: str
    root: bytes
    prefill: str
    decode: str
    items: list[TokenItem] = field(default_factory=list)
    frames: list[TokenFrame] = field(default_factory=list)
    news: asyncio.Event = field(default_factory=asyncio.Event)
    numbers: Any = field(default_factory=lambda: itertools.count(1))

    def hear(self, frame: TokenFrame) -> None:
        self.frames.append(frame)
        self.items.extend(frame.items)
        self.news.set()

    def ticket(self, prompt: list[int], max_tokens: int = 8, **fields: Any) -> Ticket:
        known: dict[str, Any] = {
            "request_id": f"{self.id}-r{next(self.numbers)}",
            "choice": 0,
            "attempt": 1,
            "router": self.id,
            "model": self.model,
            "root": self.root,
            "tenant": "anonymous",
            "salt": b"",
            "prompt": tuple(prompt),
            "delivered": (),
            "sampling": Sampling(temperature=0.0),
            "seed": 7,
            "max_tokens": max_tokens,
            "stop_ids": (),
            "deadline_ns": time.time_ns() + 120_000_000_000,
        }
        return Ticket(**(known | fields))

    async def run_prefill(self, ticket: Ticket) -> Accepted:
        run = PrefillRun(ticket, self.decode)
        return await self.bus.call(PREFILL_RUN(worker=self.prefill), run, RequestContext.after(30))

    async def run_decode(self, ticket: Ticket) -> Accepted:
        run = DecodeRun(ticket, self.prefill)
        return await self.bus.call(DECODE_RUN(worker=self.decode), run, RequestContext.after(30))

    async def run_local(self, ticket: Ticket) -> Accepted:
        """The decode worker reads the prompt itself."""
        return await self.bus.call(DECODE_RUN(worker=self.decode), DecodeRun(ticket, None), RequestContext.after(30))

    async def start(self, ticket: Ticket) -> None:
        await asyncio.gather(self.run_prefill(ticket), self.run_decode(ticket))

    async def cancel(self, ticket: Ticket, reason: CancelReason = "client_gone") -> None:
        holders = (self.prefill, self.decode)
        await self.bus.publish(
            CANCEL(), Cancel(ticket.request_id, ticket.attempt, self.id, holders, ticket.choice, reason)
        )

    def of(self, ticket: Ticket) -> list[TokenItem]:
        """Items of that attempt by index, each index once."""
        own = [
            item
            for item in self.items
            if (item.request_id, item.choice, item.attempt) == (ticket.request_id, ticket.choice, ticket.attempt)
            and item.finish != "cancelled"
        ]
        return sorted({(item.index, len(item.ids)): item for item in own}.values(), key=lambda item: item.index)

    async def until(self, predicate: Callable[[], bool], within_s: float = 100.0) -> None:
        async with asyncio.timeout(within_s):
            while not predicate():
                self.news.clear()
                await self.news.wait()

    async def answer(self, ticket: Ticket) -> list[TokenItem]:
        """Runs the attempt and waits for all items until its end. Raises the error that it ended with."""
        await self.start(ticket)
        return await self.rest(ticket)

    async def answer_local(self, ticket: Ticket) -> list[TokenItem]:
        """As `answer`, by the decode worker alone."""
        await self.run_local(ticket)
        return await self.rest(ticket)

    async def rest(self, ticket: Ticket, first: int | None = None) -> list[TokenItem]:
        """Waits for all items from output index `first` on (those not delivered, unless told)."""
        first = len(ticket.delivered) if first is None else first
        await self.until(lambda: any(item.finish for item in self.of(ticket)))
        end = next(item for item in self.of(ticket) if item.finish)
        if end.error:
            raise end.error.to_exception()
        await self.until(lambda: len(ids(self.of(ticket))) >= end.index + len(end.ids) - first)
        return self.of(ticket)

    async def cancelled_by(self, ticket: Ticket, workers: set[str]) -> None:
        """Waits until each of the workers has answered the cancel."""

        def answered() -> bool:
            told = {
                frame.worker
                for frame in self.frames
                for item in frame.items
                if item.finish == "cancelled" and item.request_id == ticket.request_id
            }
            return workers <= told

        await self.until(answered)


def ids(items: list[TokenItem]) -> list[int]:
    return [token for item in items for token in item.ids]


async def until(predicate: Callable[[], Any], within_s: float = 100.0) -> None:
    """Waits for what has no event of its own."""
    async with asyncio.timeout(within_s):
        while not predicate():  # noqa: ASYNC110
            await asyncio.sleep(0.002)


async def refused(work: Any) -> PdbusError:
    """The error that `work` raises."""
    try:
        await work
    except PdbusError as error:
        return error
    raise AssertionError("it was not refused")
