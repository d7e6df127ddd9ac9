"""What decode workers receive."""

from __future__ import annotations

from dataclasses import dataclass

from pdbus.context import DEFAULT_PRIORITY
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
    priority: int = DEFAULT_PRIORITY
    interrupted: bool = False
    """As the answer's ticket."""

    @property
    def session(self) -> str:
        return session_of(self.request_id, self.choice)


@dataclass(frozen=True, slots=True)
class Lease:
    """Granted: stream to `pd.v1.kv.<worker>.<session>.<attempt>`. Ends `lease_ms` after the last progress."""

    incarnation: str
    lease_ms: int
    cores: str = ""
    """Id of the ledger of cores (native/cores.py) that the worker shares with others; none: no ledger."""


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


@dataclass(frozen=True, slots=True)
class Adopt:
    """From one decode worker to another: an answer that is being written there is about to move here.

    The receiver fetches from `source` what it lacks of these tokens' pages (PagesWanted), and keeps all of them, and
    the root, for `lease_ms` from now on. Asked again as the answer grows. Refused: `overloaded` (no pages),
    `root_gone`, `conflict` (the two differ in page format or compute class)."""

    source: str
    request_id: str
    choice: int
    attempt: int
    """Under which it runs at the source; here it will go on under the next one."""
    tenant: str
    root: Digest
    salt: bytes
    tokens: tuple[int, ...]
    """Of whole pages: the prompt, and what of the answer is computed by now."""
    page_format: str
    compute_class: str

    @property
    def session(self) -> str:
        return session_of(self.request_id, self.choice)


@dataclass(frozen=True, slots=True)
class Adopted:
    pages: int
    """Of those asked for, how many had to be fetched."""
    lease_ms: int


@dataclass(frozen=True, slots=True)
class PagesWanted:
    """Back to the source of a move: send the pages of that answer from `first` up to `end`, as CacheHead items."""

    session: str
    attempt: int
    first: int
    end: int
    receiver: str
    """Bulk address."""
    stream: str


@dataclass(frozen=True, slots=True)
class PagesFound:
    """They are on their way. Refused: `not_found`, where the answer has ended or a page is gone."""
