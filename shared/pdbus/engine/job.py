"""One attempt's life on a worker: a task that frees in the end all that it held, however it ends."""

from __future__ import annotations

import asyncio
import logging
import time
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Coroutine
from dataclasses import replace

from pdbus.context import Deadline
from pdbus.engine.sequence import Ended, Event, Key
from pdbus.errors import Cancelled, PdbusError, WireError
from pdbus.messages.common import Ticket, session_of
from pdbus.messages.decode import Reserve
from pdbus.messages.router import Finish, TokenItem, TokenLogprob

log = logging.getLogger(__name__)


class Job(ABC):
    """`run` is the whole of it: it raises what the attempt failed of, and is cancelled by `stop` to end it early.

    Everything that the job holds is given back before `run` returns or raises."""

    task: asyncio.Task[None]

    def __init__(self, attempt: Ticket | Reserve, deadline: Deadline) -> None:
        self.request_id, self.choice, self.attempt = attempt.request_id, attempt.choice, attempt.attempt
        self.router, self.root, self.deadline = attempt.router, attempt.root, deadline
        self.tenant = attempt.tenant
        self.accepted_ns = time.time_ns()
        self.next_index = 0
        """Output index of the next item."""
        self.finished = False
        """The attempt's last item was sent: nothing more is told of it, not even an error."""
        self.stopping = False
        self.failure: PdbusError | None = None
        """Why it is being stopped; None: because nobody wants it any more."""
        self._begun = False
        self.closed = False
        """It is giving back what it held, and takes nothing more."""
        self.moving_to: str | None = None
        """The worker at which the answer goes on, should the engine let go of it now."""
        self.stays_until_s = 0.0
        """After a move that came to nothing."""
        self.ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        """The engine has let go of its sequence, or said why it failed."""

    @property
    def session(self) -> str:
        return session_of(self.request_id, self.choice)

    @property
    def key(self) -> Key:
        return self.session, self.attempt

    @property
    @abstractmethod
    def peer(self) -> str | None:
        """The worker without which it can't go on now."""

    @property
    def backlog_tokens(self) -> int:
        """Tokens of a prompt that it still has to read."""
        return 0

    @abstractmethod
    async def run(self) -> None: ...

    @abstractmethod
    def hear(self, event: Event) -> None:
        """What the engine tells of this job's sequence; in the event loop, quick."""

    def moved(self, event: Ended) -> TokenItem | None:
        """The attempt's last item, where the engine has let go of the sequence because it moves."""
        if self.moving_to is None or self.stopping or self.finished or not isinstance(event.error, Cancelled):
            return None
        return replace(self.item(finish="moved"), moved_to=self.moving_to)

    def hear_end(self, event: Ended) -> None:
        if self.ended.done():
            return
        if event.error is None or self.finished:
            self.ended.set_result(None)
        else:
            self.ended.set_exception(event.error)
            self.ended.exception()  # it may be that nobody waits any more: then the end was somebody's wish

    async def live(self) -> None:
        """Enters `run` in any case, so that it gives back what the job holds, also where it was stopped before."""
        self._begun = True
        if self.stopping:
            self.task.cancel()
        await self.run()

    def stop(self, failure: PdbusError | None = None) -> None:
        """Ends the job early, from outside of its task: with an error that is told, or quietly."""
        if not self.stopping:
            self.stopping = True
            self.failure = failure
            if self._begun:
                self.task.cancel()

    async def beside(self, part: Callable[[], Awaitable[None]]) -> None:
        """Runs a part of the job beside it; if that fails, the job does."""
        try:
            await part()
        except PdbusError as error:
            self.stop(error)
        except Exception as error:
            log.exception("attempt %s failed", self.key)
            self.stop(internal(error))

    def item(
        self,
        ids: tuple[int, ...] = (),
        logprobs: tuple[TokenLogprob, ...] = (),
        finish: Finish | None = None,
        error: PdbusError | None = None,
    ) -> TokenItem:
        """The attempt's next item."""
        return TokenItem(
            self.request_id,
            self.choice,
            self.attempt,
            self.root,
            self.next_index,
            ids,
            logprobs,
            finish,
            WireError.of(error) if error else None,
        )


def internal(error: Exception) -> PdbusError:
    """What others are told of an error that is none of theirs; the log has it whole."""
    return PdbusError(f"internal error ({type(error).__name__})")


async def to_the_end(work: Coroutine[None, None, None]) -> None:
    """Awaits `work` whole, also when cancelled meanwhile: for giving back what is held. `work` has to be bounded."""
    task = asyncio.ensure_future(work)
    while not task.done():
        try:
            await asyncio.shield(task)
        except asyncio.CancelledError:
            if task.cancelled():
                raise
    task.result()
