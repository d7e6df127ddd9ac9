"""A ticket that a simulated worker is answering, token by token."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from loadtest.simulated_answers import item_of, prompt_logprobs
from pdbus.messages.common import Ticket
from pdbus.messages.router import TokenItem


@dataclass(slots=True)
class Running:
    ticket: Ticket
    answer: Sequence[int]
    next_index: int
    cached_tokens: int | None
    """Of a prompt that is read here; None: somebody else read it."""

    def item(self) -> TokenItem:
        """With the token at `next_index`, or the answer's end."""
        ticket, index = self.ticket, self.next_index
        token = self.answer[index] if index < len(self.answer) else None
        stop = token is None or token in ticket.stop_ids
        length = not stop and index + 1 >= ticket.max_tokens
        ids = () if token is None or stop else (token,)
        item = item_of(ticket, index, ids, "stop" if stop else "length" if length else None)
        if self.cached_tokens is not None and index == len(ticket.delivered):
            item = replace(item, cached_tokens=self.cached_tokens, prompt_logprobs=prompt_logprobs(ticket))
        return item
