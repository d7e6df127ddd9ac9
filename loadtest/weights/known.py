"""How soon every worker knows an entry of the change log: by its card, which it publishes when it has read one."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence

from pdbus.bus.bus import Bus, connect
from pdbus.bus.presence import Fleet
from pdbus.context import Deadline, new_id
from pdbus.messages.changelog import Abort, LogEntry
from pdbus.messages.presence import Card
from pdbus.subjects import ANY, CHANGELOG, PRESENCE

_ANSWER_S = 30.0
_WORKERS = ("prefill", "decode")


class Watch:
    """Notes when each worker's card first said that it knows an entry."""

    def __init__(self) -> None:
        self._heard: dict[str, list[tuple[int, int]]] = {}
        self._news = asyncio.Event()

    def hear(self, card: Card) -> None:
        if card.service in _WORKERS:
            cards = self._heard.setdefault(card.id, [])
            if not cards or cards[-1][0] < card.log_seq:
                cards.append((card.log_seq, time.time_ns()))
                self._news.set()

    def known_ns(self, worker: str, seq: int) -> int | None:
        """Wall clock, as of the card's arrival here."""
        return next((at for known, at in self._heard.get(worker, ()) if known >= seq), None)

    async def all_know(self, workers: Sequence[str], seq: int) -> int:
        """When the last of them did. Raises TimeoutError."""
        async with asyncio.timeout(_ANSWER_S):
            while True:
                self._news.clear()
                moments = [self.known_ns(worker, seq) for worker in workers]
                if None not in moments:
                    return max(moment for moment in moments if moment is not None)
                await self._news.wait()


async def lags_ms(nats_url: str, model: str, count: int, every_s: float) -> list[float]:
    """From the moment at which the log's server stored an entry, by its own stamp, to the last worker's card that says
    that it is known. The entries mean nothing: they abort transactions that never were."""
    async with connect(nats_url, name="loadtest log") as bus:
        watch = Watch()
        async with await bus.subscribe(PRESENCE(service=ANY, id=ANY), watch.hear), Fleet(bus) as fleet:
            workers = await _workers(fleet, model)
            found = []
            for _ in range(count):
                seq, stored_ns = await _append(bus, model)
                found.append((await watch.all_know(workers, seq) - stored_ns) / 1e6)
                await asyncio.sleep(every_s)
            return found


async def _workers(fleet: Fleet, model: str) -> list[str]:
    def ready(fleet: Fleet) -> bool:
        return any(card.state == "ready" and card.model == model for card in fleet.live("decode"))

    await fleet.wait_for(ready, Deadline.after(_ANSWER_S))
    return [card.id for service in _WORKERS for card in fleet.live(service) if card.model == model]


async def _append(bus: Bus, model: str) -> tuple[int, int]:
    """(sequence, wall clock in ns)."""
    to = CHANGELOG(model=model)
    seq = await bus.logs.append(to, LogEntry(abort=Abort(new_id(), "a measurement")))
    async with bus.logs.follow(to, after=seq - 1) as records:
        record = await anext(records)
    return seq, record.time_ns
