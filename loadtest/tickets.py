"""The ticket of a measurement that asks an engine without a router."""

from __future__ import annotations

from collections.abc import Collection

from pdbus.context import Deadline
from pdbus.messages.common import Digest, Sampling, Ticket


def greedy_ticket(number: int, root: Digest, prompt: Collection[int], new_tokens: int, deadline: Deadline) -> Ticket:
    """`new_tokens` greedy ones, whatever they are: no token ends the answer."""
    return Ticket(
        request_id=str(number),
        choice=0,
        attempt=1,
        router="",
        model="",
        root=root,
        tenant="",
        salt=b"",
        prompt=tuple(prompt),
        delivered=(),
        sampling=Sampling(temperature=0.0),
        seed=0,
        max_tokens=new_tokens,
        stop_ids=(),
        deadline_ns=deadline.wall_ns,
    )
