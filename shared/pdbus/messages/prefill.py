"""What prefill workers receive."""

from __future__ import annotations

from dataclasses import dataclass

from pdbus.messages.common import Digest, Ticket


@dataclass(frozen=True, slots=True)
class PrefillRun:
    """Read the ticket's tokens, hand their KV to `decode_worker`, send the first new token to the router."""

    ticket: Ticket
    decode_worker: str


MOST_TEXTS = 64
"""In one Embed: request and reply fit into a message whatever the model, and the worker's queue stays fair."""


@dataclass(frozen=True, slots=True)
class Embed:
    """Compute the vectors of these texts. Refused: `root_gone`, `overloaded`; `invalid_request` where a text is too
    long."""

    model: str
    root: Digest
    texts: tuple[tuple[int, ...], ...]
    """Token ids, special ones among them; at most MOST_TEXTS texts."""


@dataclass(frozen=True, slots=True)
class Embedded:
    worker: str
    root: Digest
    compute_class: str
    vectors: tuple[bytes, ...]
    """fp32, little-endian; one for each text, in order."""
