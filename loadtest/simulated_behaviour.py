"""How a simulated worker answers."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace

from loadtest.simulated_answers import Script, item_of, letters
from pdbus.context import RequestContext
from pdbus.errors import DeadlineExceeded, PdbusError, WireError
from pdbus.messages.common import Ticket
from pdbus.messages.router import TokenFrame, TokenItem


@dataclass
class Behaviour:
    """Change it while the worker runs to bring a fault about."""

    script: Script = letters
    step_s: float = 0.0
    slots: int = 0
    """Sequences in a step, the first ones; 0: all."""
    tamper: Callable[[TokenFrame], Iterable[TokenFrame]] = lambda frame: (frame,)
    """What is sent in a frame's place: nothing (lost), twice (duplicated), later ones first, another root …"""
    refuse: PdbusError | None = None
    """What every ticket is refused with."""
    deaf: bool = False
    """Tickets reach it, and nothing comes of them; whether they did it tells in `unheard`."""
    unheard: int = 0
    hung: bool = False
    """No question is answered."""
    fail_at: int | None = None
    """Output index at which an attempt fails, retryably."""
    move_at: int | None = None
    """Output index at which a first attempt's answer moves to the worker `move_to`."""
    move_to: str = ""
    mute: bool = False
    """Accepts, and computes nothing."""
    deaf_cancels: int = 0
    """So many cancel events get lost on their way here."""

    async def hears(self, ctx: RequestContext, *, ticket: bool = True) -> None:
        """Returns if it does: else nobody is told anything."""
        if ticket and self.deaf:
            self.unheard += 1
        if self.hung or (ticket and self.deaf):
            await asyncio.sleep(ctx.deadline.remaining_s)
            raise DeadlineExceeded("not heard")

    def fault(self, ticket: Ticket, index: int, *, decodes: bool) -> TokenItem | None:
        """What comes in the place of the answer's token at `index`, and ends the attempt. None: that token comes."""
        if self.fail_at is not None and index >= self.fail_at:
            return item_of(ticket, index, (), "error", WireError("overloaded", "told to fail"))
        if ticket.attempt == 1 and index == self.move_at and decodes:
            return replace(item_of(ticket, index, (), "moved"), moved_to=self.move_to)
        return None
