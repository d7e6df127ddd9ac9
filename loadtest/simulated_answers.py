"""What simulated workers answer: ids and log-probabilities that follow from the ticket alone."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence

from pdbus.errors import WireError
from pdbus.messages.common import Ticket
from pdbus.messages.router import Finish, TokenItem, TokenLogprob

Script = Callable[[Ticket], Sequence[int]]
"""The whole answer to a ticket, as ids; it ends at the first stop id among them, or at the ticket's limit."""


def letters(ticket: Ticket) -> list[int]:
    """Ids 97 to 122 by (prompt, seed, choice) and position alone, as sampling draws them: equal in every attempt.

    A greedy ticket's don't depend on its seed and choice."""
    drawn: list[int] = [] if ticket.sampling.temperature == 0 else [ticket.seed, ticket.choice]
    start = repr((ticket.prompt, drawn)).encode()
    return [97 + byte % 26 for byte in hashlib.shake_128(start).digest(ticket.max_tokens)]


def item_of(
    ticket: Ticket,
    index: int,
    ids: tuple[int, ...],
    finish: Finish | None = None,
    error: WireError | None = None,
) -> TokenItem:
    listed = ticket.sampling.logprobs is not None
    logprobs = tuple(_logprob(token, ticket.sampling.logprobs or 0) for token in ids) if listed else ()
    return TokenItem(ticket.request_id, ticket.choice, ticket.attempt, ticket.root, index, ids, logprobs, finish, error)


def _logprob(token: int, top: int) -> TokenLogprob:
    """The chosen one is the best; the next ids follow at -1, -2, …"""
    return TokenLogprob(-0.5, tuple((token + i, -0.5 - i) for i in range(top)))


def prompt_logprobs(ticket: Ticket) -> tuple[TokenLogprob, ...] | None:
    wanted = ticket.prompt_logprobs
    return None if wanted is None else tuple(_logprob(token, wanted) for token in ticket.prompt[1:])
