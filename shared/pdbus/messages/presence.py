"""Presence: each process's card, published every 0.5 s from its work loop."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from pdbus.messages.common import Digest

State = Literal["starting", "ready", "draining", "hung"]
"""hung: its event loop lives, but what it does its work with makes no progress: as good as dead, unless it goes on."""

WHOLE_PROMPTS = 1 << 30
"""As `Card.local_tokens`: this decode worker reads every prompt itself (colocated)."""


@dataclass(frozen=True, slots=True)
class Load:
    """What a process holds right now. All of it returns to its idle level when the work is done."""

    running: int = 0
    waiting: int = 0
    backlog_tokens: int = 0
    """Of prompts that a worker has accepted and not read yet."""
    slots: int = 0
    """Sequences that a worker computes at once; 0: it doesn't say."""
    pages_total: int = 0
    pages_used: int = 0
    """Pages owned by sequences or leases; cached ones that nobody uses count as free."""
    leases: int = 0
    streams: int = 0
    """Bulk streams open, both directions."""
    bytes_used: int = 0
    bytes_total: int = 0


@dataclass(frozen=True, slots=True)
class Card:
    service: str
    id: str
    incarnation: str
    seq: int
    state: State
    model: str
    roots: tuple[Digest, ...] = ()
    """Roots that this process can serve at once."""
    load: Load = Load()
    host: str = ""
    """Name of the machine or container that it runs on."""
    bulk: str = ""
    """Bulk address."""
    compute_class: str = ""
    page_format: str = ""
    local_tokens: int = 0
    """Of decode workers, as measured: a prompt of which at most this many tokens are not in their cache they read
    themselves sooner than a hand-over would bring it."""
    url: str = ""
    """HTTP address, of routers."""
    detail: str = ""
    """For people: what it is doing while it starts, or why it isn't ready."""
    progress: int = 0
    """Counts the engine's turns, and the layers of long ones. Where it stands still for too long, `state` is `hung`."""
    embeds: bool = False
    """A prefill worker of an encoder: no decode worker is needed to serve its roots."""
    log_seq: int = 0
    """Of workers: the last entry of the change log that they know."""
    step_ms: float = 0.0
    """Of decode workers: what one token of each running answer takes lately; 0 where it isn't known yet."""
