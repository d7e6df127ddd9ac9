"""What the bus needs of a message broker: raw subjects, bytes and headers. Real in nats.py, in memory in memory.py."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Protocol, TypeAlias

from pdbus.buffer import Buffer

NO_HEADERS: Mapping[str, str] = {}
STATUS = "status"
"""Header in which the broker itself tells something."""
NO_RESPONDERS = "503"


@dataclass(slots=True)
class Raw:
    """A message as it came. Header names are in lower case."""

    subject: str
    reply: str
    headers: Mapping[str, str]
    data: Buffer
    """Whoever keeps a part of a large body keeps all of it."""


Callback: TypeAlias = Callable[[Raw], None]
"""Called in the order of arrival, straight from the reader: it must be quick. What it raises is logged and dropped."""


class Subscription(Protocol):
    async def close(self) -> None:
        """Ends the interest. What the broker sent before it knew is still delivered before this returns."""


class Transport(Protocol):
    @property
    def max_payload(self) -> int:
        """Most bytes that headers and body of a message may have together."""

    @property
    def inbox_prefix(self) -> str:
        """Subjects below it are this process's own, for replies."""

    @property
    def connected(self) -> bool: ...

    def send(self, subject: str, *parts: Buffer, reply: str = "", headers: Mapping[str, str] = NO_HEADERS) -> None:
        """Queues one message whose body is `parts` joined. Buffers must not change until they are written.

        With `reply` and nobody subscribed to `subject`, a message with status 503 comes to `reply`.
        Raises TooLarge, and Unavailable while there is no connection."""

    async def writable(self) -> None:
        """Waits while more is queued than the connection takes. Raises Unavailable when it takes nothing for long."""

    async def subscribe(self, subject: str, callback: Callback, queue: str = "") -> Subscription:
        """Interest in `subject`, known to the broker on return. Of a `queue` group, one member gets a message.

        Raises Forbidden where the broker does not let this process have it."""

    async def barrier(self) -> None:
        """Returns when the broker has handled everything that was sent before, and what it sent until then is here.

        Raises Unavailable."""

    async def ready(self) -> None:
        """Waits until there is a connection."""

    def on_lost(self, callback: Callable[[], None]) -> None:
        """`callback` is called when the connection breaks: replies to what was sent before may never come."""

    def on_refused(self, callback: Callable[[str], None]) -> None:
        """`callback` gets each subject, in lower case, that the broker did not let this process use."""
