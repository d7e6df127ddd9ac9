"""An answer while it is made: its choices' outputs, and the one queue that its reader takes them from."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Sequence
from types import TracebackType
from typing import Literal, Self

from pdbus.context import Deadline
from pdbus.errors import DeadlineExceeded
from pdbus.router.generation import Generation
from pdbus.router.models import FINGERPRINT
from pdbus.router.openai_schema import GenerateRequest
from pdbus.router.output import ChoiceOutput, Delta
from pdbus.router.prompts import Encoded
from pdbus.router.results import StoredAnswer
from pdbus.router.version import Version

Source = Literal["hit", "miss", "bypass"]
"""Of the answer, as the result cache sees it."""


class Answer:
    """Entered to begin; leaving it early cancels what still runs, at every worker.

    Deltas are put by the choices as their tokens arrive and taken by one reader. What waits between them is bounded by
    the answer's own length.
    """

    def __init__(
        self,
        request_id: str,
        request: GenerateRequest,
        version: Version,
        prompts: Sequence[Encoded],
        deadline: Deadline,
    ) -> None:
        self.request_id = request_id
        self.id = ("chatcmpl-" if request.endpoint == "chat.completions" else "cmpl-") + request_id
        self.created = int(time.time())
        self.request = request
        self.version = version
        self.fingerprint = FINGERPRINT + version.root.hex()
        """Names the root that the answer is computed from; usable as `model@fingerprint`."""
        self.prompts = prompts
        self.outputs: list[ChoiceOutput] = []
        self.source: Source = "bypass"
        self.first_s: float | None = None
        """Monotonic time of the first delta."""
        self._deadline = deadline
        self._generations: list[Generation] = []
        self._tasks: list[asyncio.Task[None]] = []
        self._stored: StoredAnswer | None = None
        self._unfinished = 0
        self._waiting: list[Delta] = []
        self._news: asyncio.Future[None] | None = None
        """What the reader waits for, while it does."""
        self._error: BaseException | None = None

    def emit(self, delta: Delta) -> None:
        """What choices write to."""
        self._waiting.append(delta)
        if delta.finish is not None:
            self._unfinished -= 1
        self._tell()

    def generate(self, generations: Sequence[Generation]) -> None:
        """One for each output, to be run on entering."""
        self._generations = list(generations)

    def replay(self, stored: StoredAnswer) -> None:
        """The answer is known already: show it on entering."""
        self._stored = stored

    async def __aenter__(self) -> Self:
        left_s = max(self._deadline.remaining_s, 0.0)
        self._unfinished = len(self.outputs)
        self._timer = asyncio.get_running_loop().call_later(left_s, self._late)
        if self._stored is not None:
            for output, choice in zip(self.outputs, self._stored.choices, strict=True):
                output.begin()
                if choice.prompt_logprobs is not None:
                    output.prompt(choice.prompt_logprobs)
                output.add(choice.ids, choice.logprobs, choice.finish)
        for generation in self._generations:
            generation.output.begin()
            self._tasks.append(asyncio.create_task(self._run(generation)))
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._timer.cancel()
        for task in self._tasks:
            if kind is not None or not self.whole:
                task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    @property
    def whole(self) -> bool:
        """Every choice has ended."""
        return self._unfinished == 0

    @property
    def failed(self) -> bool:
        """Something kept it from becoming whole."""
        return self._error is not None

    @property
    def told(self) -> bool:
        """The reader has all of it."""
        return not self._waiting and self.whole

    @property
    def prompt_tokens(self) -> int:
        return sum(len(prompt.ids) for prompt in self.prompts)

    @property
    def completion_tokens(self) -> int:
        return sum(len(output.ids) for output in self.outputs)

    @property
    def each_tokens(self) -> float:
        """Of a choice, in the mean."""
        return self.completion_tokens / len(self.outputs)

    @property
    def cached_tokens(self) -> int:
        """Prompt tokens that were not computed again; with several choices of a prompt, what the luckiest one found."""
        if self._stored is not None:
            return self.prompt_tokens
        n = self.request.n
        by_prompt = (self.outputs[start : start + n] for start in range(0, len(self.outputs), n))
        best = (max(output.cached_tokens for output in group) for group in by_prompt)
        return sum(min(cached, len(prompt.ids)) for cached, prompt in zip(best, self.prompts, strict=True))

    @property
    def cacheable(self) -> bool:
        """Whole, and computed in the one compute class that its key names."""
        return self.whole and self._stored is None and all(g.one_class for g in self._generations)

    async def batches(self) -> AsyncIterator[list[Delta]]:
        """All that is new, again and again until the answer is whole.

        Raises what a choice failed with, or DeadlineExceeded."""
        while True:
            if not self._waiting:
                if self._error is not None:
                    raise self._error
                if self.whole:
                    return
                self._news = asyncio.get_running_loop().create_future()
                await self._news
                continue
            batch, self._waiting = self._waiting, []
            if self.first_s is None:
                self.first_s = time.monotonic()
            yield batch

    async def _run(self, generation: Generation) -> None:
        try:
            await generation.run()
        except Exception as error:
            self._fail(error)

    def _late(self) -> None:
        if not self.whole:
            self._fail(DeadlineExceeded("the request's deadline passed before the answer was whole"))

    def _fail(self, error: BaseException) -> None:
        self._error = self._error or error
        self._tell()

    def _tell(self) -> None:
        if self._news is not None and not self._news.done():
            self._news.set_result(None)
