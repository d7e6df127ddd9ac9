"""Idempotency keys: the same request asked again under the same key gets the same answer.

The key seeds a request that has no seed of its own. So the request is deterministic: asked again, of whichever router,
it gives the same text, and once finished it comes from the result cache. This table only keeps one router from working
on the same key twice at once, and a key from being used for two different requests.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

from pdbus.canonical import digest
from pdbus.context import Deadline
from pdbus.errors import Conflict, DeadlineExceeded, InvalidRequest

LONGEST_KEY = 255
_REMEMBERED = 16_384


def seed_of(tenant: str, key: str) -> int:
    """An unsigned 64-bit seed."""
    return int.from_bytes(digest(["pdbus idempotency seed", tenant, key])[:8], "big")


@dataclass(slots=True)
class _Known:
    body: bytes
    lock: asyncio.Lock = field(default_factory=asyncio.Lock)
    users: int = 0
    used: bool = False
    """A request under it was more than a refusal."""


class IdempotencyTable:
    def __init__(self) -> None:
        self._known: OrderedDict[tuple[str, str], _Known] = OrderedDict()

    def __len__(self) -> int:
        return len(self._known)

    @property
    def users(self) -> int:
        """Requests at work or waiting under some key."""
        return sum(known.users for known in self._known.values())

    @asynccontextmanager
    async def hold(self, tenant: str, key: str, body: bytes, deadline: Deadline) -> AsyncIterator[None]:
        """Waits until no other request under the key is at work. `body` is a digest of the request.

        A request that turns out to be invalid leaves its key free: it may be put right and sent again.
        Raises InvalidRequest for an unusable key, Conflict where it was used for another request, DeadlineExceeded."""
        if not 0 < len(key) <= LONGEST_KEY:
            raise InvalidRequest(f"an idempotency key has 1 to {LONGEST_KEY} characters", param="Idempotency-Key")
        known = self._known.setdefault((tenant, key), _Known(body))
        if known.body != body:
            raise Conflict("this idempotency key was used for another request", param="Idempotency-Key")
        self._known.move_to_end((tenant, key))
        known.users += 1
        try:
            self._forget_oldest()
            try:
                async with deadline.timeout():
                    await known.lock.acquire()
            except TimeoutError:
                raise DeadlineExceeded("the same request was still at work") from None
            invalid = False
            try:
                yield
            except InvalidRequest:
                invalid = True
                raise
            finally:
                known.used |= not invalid
                known.lock.release()
        finally:
            known.users -= 1
            if not known.used and not known.users and self._known.get((tenant, key)) is known:
                del self._known[tenant, key]

    def _forget_oldest(self) -> None:
        """Those in use are at most as many as requests are admitted, so only idle ones need to go."""
        while len(self._known) > _REMEMBERED:
            oldest = next((name for name, known in self._known.items() if not known.users), None)
            if oldest is None:
                return
            del self._known[oldest]
