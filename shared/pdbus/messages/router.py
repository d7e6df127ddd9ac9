"""What routers receive: requests of callers, and tokens of workers."""

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


Finish = Literal["stop", "length", "cancelled", "error"]


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


@dataclass(frozen=True, slots=True)
class TokenFrame:
    """The new tokens of one step for all of one router's requests."""

    worker: str
    incarnation: str
    seq: int
    """Counts this worker's frames to this router."""
    items: tuple[TokenItem, ...]
