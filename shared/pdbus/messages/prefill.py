"""What prefill workers receive."""

from __future__ import annotations

from dataclasses import dataclass

from pdbus.messages.common import Ticket


@dataclass(frozen=True, slots=True)
class PrefillRun:
    """Read the ticket's tokens, hand their KV to `decode_worker`, send the first new token to the router."""

    ticket: Ticket
    decode_worker: str
