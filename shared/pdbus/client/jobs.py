"""Durable jobs: work that is answered once, whatever dies in between."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Mapping
from typing import Any, Protocol, TypeVar

import msgspec

from pdbus.bus.bus import Bus
from pdbus.client.retries import Retries
from pdbus.context import RequestContext, new_id
from pdbus.errors import Cancelled, DeadlineExceeded, PdbusError, WireError
from pdbus.messages.jobs import JOB_PRIORITY, JobEndpoint, JobSubmit, JobTold, JobWanted
from pdbus.subjects import JOB_CANCEL, JOB_STATE, JOB_SUBMIT, JOB_WATCH, To

Q = TypeVar("Q")
R = TypeVar("R")
_ASK_S = 20.0
"""One router is asked for so long; then another, which may be there when the first is not."""


class Call(Protocol):
    """Asks, and asks again while that may help."""

    async def __call__(self, to: To[Q, R], request: Q, ctx: RequestContext) -> R: ...


class Jobs:
    """`client.jobs`. A job runs within a day of its submission, and its result is readable for another.

    All methods raise the errors of pdbus.errors; NotFound for a job that is not there, or is another's."""

    def __init__(
        self,
        bus: Bus,
        model: str,
        context: Callable[[float | None], RequestContext],
        call: Call,
        retries: Callable[[RequestContext], Retries],
    ) -> None:
        """`model`: as given to `connect`."""
        self._bus = bus
        self._named = model
        self._model = model.partition("@")[0]
        self._context = context
        self._call = call
        self._retries = retries

    async def submit(
        self,
        endpoint: JobEndpoint,
        body: Mapping[str, Any],
        *,
        idempotency_key: str | None = None,
        metadata: Mapping[str, str] | None = None,
        priority: int = JOB_PRIORITY,
        timeout_s: float | None = None,
    ) -> JobTold:
        """Returns once the job is stored. `body`: of the endpoint, as OpenAI's API has it; the model may be left out.
        `priority`: 0 to 9, those who wait for an answer having 5; the key may limit it.

        The same submission under the same key is the same job, and another one is refused (Conflict)."""
        key = idempotency_key or new_id()
        asked = JobSubmit(endpoint, {"model": self._named, **body}, key, dict(metadata or {}), priority)
        return await self._call(JOB_SUBMIT(model=self._model), asked, self._context(timeout_s))

    async def state(self, id: str, *, timeout_s: float | None = None) -> JobTold:
        wanted = JobWanted(id)
        return await self._call(JOB_STATE(model=self._model), wanted, self._context(timeout_s))

    async def result(self, id: str, *, wait_s: float = 600.0) -> dict[str, Any]:
        """The answer's object, waited for. Raises DeadlineExceeded where it has not ended by then, and the error that
        it ended with."""
        ctx = self._context(wait_s + 1.0)
        while True:
            left_s = ctx.deadline.remaining_s - 1.0
            told = await self._call(JOB_STATE(model=self._model), JobWanted(id, max(min(left_s, _ASK_S), 0.0)), ctx)
            if told.final:
                return answer_of(told)
            if left_s <= 0:
                raise DeadlineExceeded(f"the job {id} is {told.status}")

    async def progress(self, id: str, *, timeout_s: float = 600.0) -> AsyncIterator[JobTold]:
        """Its state at each change, the last one once it has ended; goes on with another router when one dies."""
        ctx = self._context(timeout_s)
        retries = self._retries(ctx)
        before: JobTold | None = None
        while True:
            try:
                async with self._bus.stream(JOB_WATCH(model=self._model), JobWanted(id), ctx) as states:
                    async for told in states:
                        retries.progressed()
                        if told != before:
                            yield told
                        before = told
                        if told.final:
                            return
            except PdbusError as error:
                await retries.failed(error)

    async def cancel(self, id: str, *, timeout_s: float | None = None) -> JobTold:
        """Ends it, unless it has ended: then its result stays."""
        wanted = JobWanted(id)
        return await self._call(JOB_CANCEL(model=self._model), wanted, self._context(timeout_s))


_HTTP_CODES = {
    "invalid_api_key": "unauthorized",
    "model_not_found": "not_found",
    "context_length_exceeded": "too_large",
}
"""Where an error's code in a result is OpenAI's, and not ours."""


def answer_of(told: JobTold) -> dict[str, Any]:
    """Of a job that has ended. Raises what it ended with."""
    if told.status == "cancelled":
        raise Cancelled(f"the job {told.id} was cancelled")
    data: dict[str, Any] = msgspec.json.decode(told.data)
    if told.status == "failed":
        error = data["error"]
        code = str(error.get("code"))
        raise WireError(_HTTP_CODES.get(code, code), error["message"], error.get("param")).to_exception()
    return data
