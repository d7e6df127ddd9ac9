"""What prefill and decode workers both receive."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, TypeAlias

from pdbus.messages.common import Digest, session_of
from pdbus.messages.router import TokenItem

CancelReason: TypeAlias = Literal["finished", "stopped", "client_gone", "deadline", "superseded", "peer_failed"]
"""finished: the answer reached the client, its worker ended it itself; stopped: the router ended it (a stop string)."""


@dataclass(frozen=True, slots=True)
class Accepted:
    worker: str
    incarnation: str
    waiting: int
    """Requests ahead of this one in the worker's queue."""


@dataclass(frozen=True, slots=True)
class Cancel:
    """Free everything held for this attempt.

    Published to all. Each of `holders` answers, also when it holds nothing, with a TokenItem of finish "cancelled"
    (index -1, no ids) to the router, so that the router can stop repeating it. Reason "finished" is not answered."""

    request_id: str
    attempt: int
    """Attempts up to this one are meant."""
    router: str
    holders: tuple[str, ...]
    """Worker ids that may hold something."""
    choice: int | None = None
    """None: all choices."""
    reason: CancelReason = "client_gone"
    """`finished`: the answer reached the client; the worker may forget the frames kept for a resend."""


@dataclass(frozen=True, slots=True)
class Resend:
    """Frames are missing, or nothing came for a while."""

    request_id: str
    choice: int
    attempt: int
    from_index: int

    @property
    def session(self) -> str:
        return session_of(self.request_id, self.choice)


@dataclass(frozen=True, slots=True)
class ResendReply:
    state: Literal["running", "finished", "unknown"]
    """unknown: this worker holds nothing of that attempt; the router must start another."""
    items: tuple[TokenItem, ...] = ()


@dataclass(frozen=True, slots=True)
class Drain:
    """Asks one process to hand its work over and to end, as SIGTERM does; asked again it only tells how far it is.
    Refused: `conflict`, where another incarnation is meant."""

    incarnation: str


@dataclass(frozen=True, slots=True)
class Draining:
    running: int
    """What it still has to finish or to hand over."""
    waiting: int
    pages_used: int
    moved: int
    """Answers that have moved to another worker since it was asked."""


@dataclass(frozen=True, slots=True)
class Invalidated:
    """The invalidator's log: what is being deleted, or may be filled again."""

    model: str
    action: Literal["delete", "restore", "delete_name"]
    """delete: entries made from `root`, and no more fills of it; restore: a rollback made it live again;
    delete_name: the named entry `name`, below `generation`."""
    root: Digest = b""
    name: str = ""
    generation: int = 0
    second: bool = False
    """The second delete, after the longest deadline: no fill begun before the first can still be running."""
    cause: int = 0
    """Change-log sequence of the entry that made it so."""
