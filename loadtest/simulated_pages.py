"""Which pages a simulated worker would have, and how it tells routers of them."""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Self

from pdbus.bus.bus import Bus
from pdbus.context import RequestContext
from pdbus.kv.prefix import PageKey, PrefixScope, page_keys
from pdbus.messages.common import Digest, Ticket
from pdbus.messages.router import INDEX_KEY_BYTES, KvIndex, KvIndexSnapshot, KvIndexWanted
from pdbus.subjects import KVINDEX, KVINDEX_SNAPSHOT
from pdbus.tasks import cancelled

TELL_EVERY_S = 0.05


class SimulatedPages:
    """At most `most` pages, the least recently used ones evicted first. Roots without a scope have none."""

    def __init__(
        self, worker: str, incarnation: str, bus: Bus, scopes: Mapping[Digest, PrefixScope], most: int
    ) -> None:
        self.lost: Callable[[KvIndex], bool] = lambda _: False
        """Which messages don't arrive."""
        self.snapshots = 0
        """How often somebody asked for all."""
        self._worker, self._incarnation = worker, incarnation
        self._bus = bus
        self._scopes = scopes
        self._most = most
        self._pages: OrderedDict[bytes, None] = OrderedDict()
        self._told: set[bytes] = set()
        """As of the last message."""
        self._seq = 0
        self._news = asyncio.Event()

    async def __aenter__(self) -> Self:
        to = KVINDEX_SNAPSHOT(worker=self._worker)
        self._registration = await self._bus.serve(to, self._on_wanted)
        self._telling = asyncio.create_task(self._tell())
        return self

    async def __aexit__(self, *_: object) -> None:
        await cancelled(self._telling)
        await self._registration.close()

    @property
    def count(self) -> int:
        return len(self._pages)

    @property
    def untold(self) -> bool:
        """Something changed that no message, lost or not, was made of yet."""
        return self._told != self._pages.keys()

    def read(self, ticket: Ticket) -> int:
        """The prompt is read: returns how many of its tokens were here already. All its full pages are then."""
        if ticket.prompt_logprobs is not None or ticket.root not in self._scopes:
            return 0
        keys = self._keys(ticket, ticket.tokens)
        found = 0
        for key in keys[: (len(ticket.tokens) - 1) // self._page_tokens(ticket)]:
            if key not in self._pages:
                break
            found += 1
        self._store(keys)
        return min(found * self._page_tokens(ticket), len(ticket.prompt))

    def filled(self, ticket: Ticket, answer: Sequence[int]) -> None:
        """The ticket's tokens and those of its answer, but for the last one, have been computed."""
        if ticket.prompt_logprobs is None and ticket.root in self._scopes:
            self._store(self._keys(ticket, (*ticket.prompt, *answer)[:-1]))

    def clear(self) -> None:
        """Forgets everything, as when a version is dropped."""
        self._pages.clear()
        self._news.set()

    def _keys(self, ticket: Ticket, tokens: Sequence[int]) -> list[bytes]:
        scope = replace(self._scopes[ticket.root], salt=ticket.salt)
        return [_cut(key) for key in page_keys(tokens, scope)]

    def _page_tokens(self, ticket: Ticket) -> int:
        return self._scopes[ticket.root].page_format.page_tokens

    def _store(self, keys: Sequence[bytes]) -> None:
        for key in reversed(keys):  # a prefix outlives its continuations
            self._pages[key] = None
            self._pages.move_to_end(key)
        while len(self._pages) > self._most:
            self._pages.popitem(last=False)
        self._news.set()

    async def _on_wanted(self, message: KvIndexWanted, ctx: RequestContext) -> KvIndexSnapshot:
        self.snapshots += 1
        return KvIndexSnapshot(self._incarnation, self._seq, b"".join(self._told))

    async def _tell(self) -> None:
        while True:
            await self._news.wait()
            self._news.clear()
            now = set(self._pages)
            stored, evicted = tuple(now - self._told), tuple(self._told - now)
            if stored or evicted:
                self._told = now
                self._seq += 1
                message = KvIndex(self._worker, self._incarnation, self._seq, stored, evicted)
                if not self.lost(message):
                    await self._bus.publish(KVINDEX(worker=self._worker), message)
            await asyncio.sleep(TELL_EVERY_S)


def _cut(key: PageKey) -> bytes:
    return key.digest[:INDEX_KEY_BYTES]
