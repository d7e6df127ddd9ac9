"""One attempt's life on a worker: a task that frees in the end all that it held, however it ends."""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod

from pdbus.context import Deadline
from pdbus.engine.sequence import Event, Key
from pdbus.errors import PdbusError
from pdbus.messages.common import Digest
from pdbus.messages.router import TokenItem


class Job(ABC):
    """`run` is the whole of it: it raises what the attempt failed of, and is cancelled to end it early.

    Everything is given back before `run` returns or raises."""

    task: asyncio.Task[None]

    def __init__(
        self, request_id: str, choice: int, attempt: int, router: str, root: Digest, deadline: Deadline
    ) -> None:
        self.request_id, self.choice, self.attempt = request_id, choice, attempt
        self.router, self.root, self.deadline = router, root, deadline
        self.next_index = 0
        """Output index that the next item has."""
        self.finished = False
        """The attempt's last item was sent: nothing more is told of it, not even an error."""
        self._failure: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    @property
    def session(self) -> str:
        return f"{self.request_id}-{self.choice}"

    @property
    def key(self) -> Key:
        return self.session, self.attempt

    @property
    def peer(self) -> str | None:
        """The worker without which it can't go on; None: it needs none now."""
        return None

    @abstractmethod
    async def run(self) -> None: ...

    @abstractmethod
    def hear(self, event: Event) -> None:
        """What the engine tells of this job's sequence; in the event loop, quick."""

    def item(self, **fields: object) -> TokenItem:
        """An item of this attempt at `next_index`, or at the `index` that is given."""
        fields = {"index": self.next_index, "ids": (), **fields}
        return TokenItem(self.request_id, self.choice, self.attempt, self.root, **fields)  # type: ignore[arg-type]

    def fail(self, error: PdbusError) -> None:
        """Ends the job with this error, from outside of its task."""
        if not self._failure.done():
            self._failure.set_exception(error)
