"""What routers receive: requests of callers, tokens of workers, and which prefixes these have."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from pdbus.errors import WireError
from pdbus.messages.common import Digest


@dataclass(frozen=True, slots=True)
class InferRequest:
    """A generation request: the body of the OpenAI endpoint of that name, with the same fields and the same rules."""

    endpoint: Literal["chat.completions", "completions"]
    body: dict[str, Any]
    idempotency_key: str | None = None


@dataclass(frozen=True, slots=True)
class InferReply:
    """One OpenAI object: each chunk of a streamed answer, or the whole answer."""

    data: dict[str, Any]


@dataclass(frozen=True, slots=True)
class EmbedRequest:
    """Texts, or token ids of texts, to be embedded: as `input` of the OpenAI endpoint."""

    input: tuple[str | tuple[int, ...], ...]
    ref: str | None = None
    """A ref, or a root in hex; None: the default."""
    cache_control: str = ""
    """As the HTTP header: no-store, no-cache, max-age=SECONDS."""
    session: str | None = None
    """What it belongs to: it is served by one version while canaries run."""


@dataclass(frozen=True, slots=True)
class EmbedReply:
    root: Digest
    """The version that all vectors are of."""
    dimensions: int
    vectors: bytes
    """fp32, little-endian, `dimensions` numbers for each input, in order."""
    tokens: int
    hits: int
    """Of the inputs, those that came from the cache."""


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    logprob: float
    top: tuple[tuple[int, float], ...] = ()
    """(token id, log-probability), best first."""


Finish = Literal["stop", "length", "cancelled", "error", "moved"]
"""moved: this attempt ends here, so that the next one goes on at `TokenItem.moved_to`."""


@dataclass(frozen=True, slots=True)
class TokenItem:
    """The next tokens of one choice. Exactly one item of an attempt, its last, has `finish`."""

    request_id: str
    choice: int
    attempt: int
    root: Digest
    index: int
    """Output index of the first of `ids`: by it routers order items, drop repeated ones and notice missing ones."""
    ids: tuple[int, ...]
    logprobs: tuple[TokenLogprob, ...] = ()
    """One for each id, where asked for."""
    finish: Finish | None = None
    error: WireError | None = None
    """With finish "error": why this attempt ended; retryable ones make the router try elsewhere."""
    cached_tokens: int | None = None
    """On the first item: how many of the prompt's tokens came from a cache."""
    prompt_logprobs: tuple[TokenLogprob, ...] | None = None
    """On the first item, where asked for: one for each prompt token after the first."""
    moved_to: str | None = None
    """With finish "moved": the decode worker that has the answer's pages by now."""


@dataclass(frozen=True, slots=True)
class TokenFrame:
    """The new tokens of one step for all of one router's requests."""

    worker: str
    incarnation: str
    seq: int
    """Counts this worker's frames to this router."""
    items: tuple[TokenItem, ...]


INDEX_KEY_BYTES = 8
"""Of a prefix key in the index: enough to choose a worker by; the worker itself compares whole keys."""


@dataclass(frozen=True, slots=True)
class KvIndex:
    """Changes of a worker's findable pages since its last message; a key is in one of the two at most."""

    worker: str
    incarnation: str
    seq: int
    """Counts this incarnation's messages, from 1."""
    stored: tuple[bytes, ...] = ()
    """Prefix keys, cut to INDEX_KEY_BYTES."""
    evicted: tuple[bytes, ...] = ()
    clear: bool = False
    """All earlier messages are void."""


@dataclass(frozen=True, slots=True)
class KvIndexWanted:
    """Asks a worker for its whole index: a message was missed, or none was ever heard."""


@dataclass(frozen=True, slots=True)
class KvIndexSnapshot:
    incarnation: str
    seq: int
    """Of the last message whose changes are in it; 0 before the first."""
    keys: bytes
    """INDEX_KEY_BYTES each, joined."""


@dataclass(frozen=True, slots=True)
class RefStatsWanted:
    """Asks a router what its requests met, by ref."""


@dataclass(frozen=True, slots=True)
class RefFigures:
    """Of the requests that a router admitted by a ref while that named this version."""

    ref: str
    root: Digest
    requests: int
    errors: int
    """Requests among them that got no answer, unless their callers had left."""
    first_token_s: tuple[float, ...] = ()
    """Of the latest ones that were computed: from admission to the first token."""
    per_token_s: tuple[float, ...] = ()
    """Likewise: the mean over each answer's tokens after the first."""


@dataclass(frozen=True, slots=True)
class RefStats:
    router: str
    refs: tuple[RefFigures, ...]
