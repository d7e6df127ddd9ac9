"""Leases: pages that wait for a prompt's KV, by (session, attempt). Pure; time is passed in.

A lease is granted to a prefill worker, renewed by every frame that arrives, and ends in one of three ways: taken over
by the running sequence, released (cancel, newer attempt, failure of either leg), or expired. Whoever ends it removes it
here first and then frees its pages, so that a frame which comes later finds no lease and is not written.

Writes into the pool go through `take`: it checks attempt, root, place and size, and the caller writes without an await
in between.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from pdbus.checksum import crc32
from pdbus.engine.sequence import Key
from pdbus.errors import Corrupt
from pdbus.kv.format import PageFormat
from pdbus.kv.page_hold import PageHold
from pdbus.messages.bulk import KvHead
from pdbus.messages.decode import KvFinal, Reserve

LEASE_S = 15.0
"""Longer than the slowest single pass of a prefill worker: its frames come in bursts, one for each chunk. That the
worker died is known earlier, from its presence."""


@dataclass(eq=False, slots=True)
class PageLease:
    """What has arrived so far of one prompt's KV, in the pages of `hold`."""

    reserve: Reserve
    hold: PageHold
    renewed_s: float
    frames: int = 0
    checksum: int = 0
    """Running CRC-32 of all bodies in order."""
    arrived: dict[int, int] = field(default_factory=dict)
    """Tokens from the first on that each layer holds."""
    final: KvFinal | None = None

    @property
    def key(self) -> Key:
        return self.reserve.session, self.reserve.attempt

    def take(self, head: KvHead, body: bytes | bytearray | memoryview, page_format: PageFormat) -> tuple[int, ...]:
        """The pages that a frame's body belongs to; counts it as written. Raises Corrupt where anything doesn't fit."""
        self._check_generation(head.attempt, head.root)
        start, end = head.start, head.start + head.tokens
        layers = range(head.layer, head.layer + head.layers)
        if not layers or not 0 <= layers.start < layers.stop <= page_format.layers:
            raise Corrupt(f"KV of {head.layers} layers from {head.layer} on, where there are {page_format.layers}")
        for layer in layers:
            expected = self.arrived.get(layer, 0)
            if start != expected or start % page_format.page_tokens:
                raise Corrupt(f"KV of layer {layer} from token {start} on, where {expected} was expected")
        if not start < end <= self.reserve.tokens or (end % page_format.page_tokens and end != self.reserve.tokens):
            raise Corrupt(f"KV of the tokens {start} to {end}, where {self.reserve.tokens} were announced")
        pages = self.hold.pages[start // page_format.page_tokens : page_format.pages_for(end)]
        size = memoryview(body).nbytes
        if size != len(layers) * len(pages) * page_format.layer_bytes:
            raise Corrupt(f"{size} bytes came for {len(pages)} pages of {len(layers)} layers of {page_format}")
        self.arrived |= dict.fromkeys(layers, end)
        self.frames += 1
        self.checksum = crc32(body, self.checksum)
        return pages

    def finish(self, final: KvFinal, page_format: PageFormat) -> None:
        """Takes the final frame. Raises Corrupt unless all that it tells of has arrived, unchanged."""
        self._check_generation(final.attempt, final.root)
        if final.tokens != self.reserve.tokens:
            raise Corrupt(f"KV of {final.tokens} tokens was sent, and {self.reserve.tokens} were announced")
        if final.frames != self.frames or final.checksum != self.checksum:
            raise Corrupt(f"{self.frames} of {final.frames} KV frames arrived, or the checksum of their bodies differs")
        missing = [layer for layer in range(page_format.layers) if self.arrived.get(layer, 0) != final.tokens]
        if missing:
            raise Corrupt(f"the KV of layer {missing[0]} is incomplete")
        first = final.first
        if (first.request_id, first.choice, first.attempt) != (
            self.reserve.request_id,
            self.reserve.choice,
            self.reserve.attempt,
        ) or first.root != self.reserve.root:
            raise Corrupt("the first token belongs to another attempt")
        if not 0 <= (first.cached_tokens or 0) <= final.tokens:
            raise Corrupt(f"{first.cached_tokens} of {final.tokens} tokens can't have been cached")
        self.final = final

    def _check_generation(self, attempt: int, root: bytes) -> None:
        if attempt != self.reserve.attempt or root != self.reserve.root:
            raise Corrupt(f"a frame of attempt {attempt} came for attempt {self.reserve.attempt}, or of another root")


class Leases:
    """The leases of one decode worker."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._leases: dict[Key, PageLease] = {}

    def __len__(self) -> int:
        return len(self._leases)

    @property
    def full(self) -> bool:
        return len(self._leases) >= self._most

    def add(self, lease: PageLease) -> None:
        if lease.key in self._leases:
            raise ValueError(f"a lease for {lease.key} exists already")
        self._leases[lease.key] = lease

    def get(self, key: Key) -> PageLease | None:
        return self._leases.get(key)

    def remove(self, lease: PageLease) -> bool:
        """False where it was removed before: then another one frees its pages."""
        if self._leases.get(lease.key) is not lease:
            return False
        del self._leases[lease.key]
        return True

    def expired(self, now_s: float) -> list[PageLease]:
        """Those without progress for LEASE_S that don't yet hold all of their KV."""
        return [one for one in self._leases.values() if one.final is None and now_s - one.renewed_s >= LEASE_S]
