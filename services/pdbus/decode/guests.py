"""Answers that are about to move here: their pages, fetched from where they are written, and their root, for a while.

A guest holds nothing that another attempt could write into: its pages are full and published under their prefix keys,
so the attempt that goes on with the answer finds them as it finds any cached page. Whoever comes too late, twice or not
at all costs time and memory for a lease, never a token.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence as Many
from dataclasses import dataclass
from typing import TYPE_CHECKING

from pdbus.bus.bulk_receive import Incoming
from pdbus.context import RequestContext
from pdbus.engine.tickets import is_name
from pdbus.engine.version import Pin
from pdbus.engine.worker import LOAD_S
from pdbus.errors import Conflict, Corrupt, InvalidRequest, Overloaded, RootGone, StaleAttempt
from pdbus.kv.codec import import_page
from pdbus.kv.page_hold import PageHold
from pdbus.kv.prefix import PageKey, page_keys
from pdbus.messages.bulk import CacheHead
from pdbus.messages.decode import Adopt, Adopted, PagesWanted
from pdbus.subjects import DECODE_PAGES

if TYPE_CHECKING:
    from pdbus.decode.worker import DecodeWorker

LEASE_S = 5.0
"""From the last word of the source: the router starts the next attempt within a few ms of the last one's end."""
MOST_GUESTS = 64


@dataclass(eq=False, slots=True)
class _Guest:
    attempt: int
    hold: PageHold
    pin: Pin
    renewed_s: float


class Guests:
    """Of one worker, by session. Used from the event loop."""

    def __init__(self, worker: DecodeWorker) -> None:
        self._worker = worker
        self._guests: dict[str, _Guest] = {}

    def __len__(self) -> int:
        return len(self._guests)

    async def adopt(self, message: Adopt, ctx: RequestContext) -> Adopted:
        """Returns when all of these pages are here. Idempotent: what is here is not fetched again."""
        worker = self._worker
        self._check(message)
        pin = await worker.versions.pin(message.root, ctx.deadline.within(LOAD_S))
        hold = worker.core.pages.hold(message.tenant)
        try:
            if len(message.tokens) > pin.version.config.max_positions:
                raise InvalidRequest("more tokens than the context holds", param="tokens")
            keys = page_keys(message.tokens, pin.version.salted(message.salt))
            here = await worker.core.call(lambda: self._make_room(hold, keys))
            if here < len(keys):
                await self._fetch(message, hold.pages, here, ctx)
                if message.root not in worker.versions.roots:
                    raise RootGone("the version was deleted meanwhile")
                await worker.core.call(lambda: self._publish(hold, keys, here))
            self._keep(message, _Guest(message.attempt, hold, pin, time.monotonic()))
        except BaseException:
            worker.core.post(hold.release)
            pin.release()
            raise
        return Adopted(len(keys) - here, int(LEASE_S * 1e3))

    def release(self, session: str) -> None:
        """An attempt has its pages, or needs them no more."""
        if guest := self._guests.pop(session, None):
            self._worker.core.post(guest.hold.release)
            guest.pin.release()

    def expire(self, now_s: float) -> None:
        for session, guest in list(self._guests.items()):
            if now_s - guest.renewed_s >= LEASE_S:
                self.release(session)

    def close(self) -> None:
        for session in list(self._guests):
            self.release(session)

    def _check(self, message: Adopt) -> None:
        worker = self._worker
        if not is_name(message.source) or message.attempt < 1:
            raise InvalidRequest("the source of a move has no name, or its attempt no number")
        alike = message.page_format == str(worker.pool.format)
        if not alike or message.compute_class != worker.versions.compute_class:
            raise Conflict("pages of another format or compute class are of no use here")
        if not message.tokens or len(message.tokens) % worker.pool.format.page_tokens:
            raise InvalidRequest("only whole pages move", param="tokens")
        known = self._guests.get(message.session)
        if known and known.attempt > message.attempt:
            raise StaleAttempt(f"attempt {message.attempt} of {message.session} is older than {known.attempt}")
        if known is None and len(self._guests) >= MOST_GUESTS:
            raise Overloaded(f"{len(self._guests)} answers are moving here already", retry_after_s=0.5)

    def _make_room(self, hold: PageHold, keys: Many[PageKey]) -> int:
        """In the engine's thread: takes the pages that are here, and room for the rest, such that every running answer
        can still grow. Returns how many are here."""
        core = self._worker.core
        here = hold.match(keys)
        missing = len(keys) - here
        if core.preempted or not core.pages.can_allocate(missing + core.running + 1):
            raise Overloaded("no KV pages are free here", retry_after_s=0.5)
        hold.allocate(missing)
        return here

    async def _fetch(self, message: Adopt, pages: Many[int], first: int, ctx: RequestContext) -> None:
        bulk = self._worker.bus.bulk
        async with bulk.receive(ctx.deadline) as incoming:
            wanted = PagesWanted(message.session, message.attempt, first, len(pages), bulk.address, incoming.stream)
            await self._worker.bus.call(DECODE_PAGES(worker=message.source), wanted, ctx)
            await self._fill(incoming, pages, first, ctx)

    async def _fill(self, incoming: Incoming, pages: Many[int], first: int, ctx: RequestContext) -> None:
        expected = first
        async for head, body in incoming.items(CacheHead, ctx.deadline):
            if head.index != expected or expected == len(pages):
                raise Corrupt(f"page {head.index} of a moving answer came where {expected} was expected")
            import_page(self._worker.pool, pages[expected], body)
            expected += 1
            await asyncio.sleep(0)  # a page takes a while to copy: tokens go first
        if expected < len(pages):
            raise Corrupt(f"{expected} of {len(pages)} pages of a moving answer came")

    def _publish(self, hold: PageHold, keys: Many[PageKey], first: int) -> None:
        for page, key in zip(hold.pages[first:], keys[first:], strict=True):
            self._worker.core.pages.publish(page, key)

    def _keep(self, message: Adopt, guest: _Guest) -> None:
        self.release(message.session)
        self._guests[message.session] = guest
