"""What decode workers receive."""

from __future__ import annotations

from dataclasses import dataclass

from pdbus.messages.common import Digest, Ticket, session_of
from pdbus.messages.router import TokenItem


@dataclass(frozen=True, slots=True)
class DecodeRun:
    """Continue the ticket once `prefill_worker` has handed over the KV of all its tokens.

    Without one, this worker reads them itself: then it sends every token, in its first item `cached_tokens` too."""

    ticket: Ticket
    prefill_worker: str | None


@dataclass(frozen=True, slots=True)
class Reserve:
    """A prefill worker asks for pages before it streams.

    Refused: `overloaded` (no pages), `stale_attempt`, `root_gone`, `conflict` (the two differ in page format)."""

    request_id: str
    choice: int
    attempt: int
    router: str
    root: Digest
    tokens: int
    """Tokens whose KV will come: prompt and delivered ones."""
    prefill_worker: str
    page_format: str
    """Layers, page size, heads, dtype as kv/format.py spells them; both sides must agree to the letter."""
    compute_class: str
    deadline_ns: int
    tenant: str = "anonymous"

    @property
    def session(self) -> str:
        return session_of(self.request_id, self.choice)


@dataclass(frozen=True, slots=True)
class Lease:
    """Granted: stream to `pd.v1.kv.<worker>.<session>.<attempt>`. Ends `lease_ms` after the last progress."""

    incarnation: str
    lease_ms: int


@dataclass(frozen=True, slots=True)
class KvFinal:
    """Body of the stream's last frame: after it, and only if all of it fits, decoding may start."""

    attempt: int
    root: Digest
    tokens: int
    tokens_digest: Digest
    """Of the tokens whose KV it is (kv/prefix.py)."""
    frames: int
    """KV frames before this one."""
    checksum: int
    """CRC-32 of all their bodies in order."""
    first: TokenItem
    """The token that prefill sampled; the router has it from prefill already."""
