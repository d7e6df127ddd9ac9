"""/v1/jobs and /v1/batches."""

from __future__ import annotations

from typing import TypeVar

import msgspec
from aiohttp import web

from pdbus.context import new_id
from pdbus.errors import InvalidRequest
from pdbus.messages.jobs import JOB_PRIORITY, JobSubmit
from pdbus.router.http_body import read_body
from pdbus.router.http_caller import IDENTITY, caller_of
from pdbus.router.jobs.batches import Batches, NewBatch
from pdbus.router.jobs.lines import ENDPOINTS
from pdbus.router.jobs.openai_jobs import BatchBody, BatchList, JobBody, batch, job
from pdbus.router.jobs.told import Jobs
from pdbus.router.openai_reasons import explain

S = TypeVar("S", bound=msgspec.Struct)
LONGEST_WAIT_S = 60.0
MOST_LISTED = 100
LISTED = 20


class HttpJobs:
    def __init__(self, jobs: Jobs, batches: Batches) -> None:
        self._jobs, self._batches = jobs, batches

    def routes(self) -> list[web.RouteDef]:
        return [
            web.post("/v1/jobs", self._submit),
            web.get("/v1/jobs/{id}", self._state),
            web.delete("/v1/jobs/{id}", self._cancel),
            web.post("/v1/batches", self._create),
            web.get("/v1/batches", self._list),
            web.get("/v1/batches/{id}", self._batch),
            web.post("/v1/batches/{id}/cancel", self._cancel_batch),
        ]

    async def _submit(self, http: web.Request) -> web.Response:
        body = _parsed(await read_body(http), JobBody)
        key, priority = _asked(http)
        metadata = dict(body.metadata or {})
        asked = JobSubmit(ENDPOINTS[body.endpoint], body.body, new_id() if key is None else key, metadata, priority)
        return _json(job(await self._jobs.submit(asked, http[IDENTITY])))

    async def _state(self, http: web.Request) -> web.Response:
        wait_s = number(http, "wait", 0, int(LONGEST_WAIT_S), 0)
        return _json(job(await self._jobs.state(http[IDENTITY].tenant, http.match_info["id"], wait_s)))

    async def _cancel(self, http: web.Request) -> web.Response:
        return _json(job(await self._jobs.cancel(http[IDENTITY].tenant, http.match_info["id"])))

    async def _create(self, http: web.Request) -> web.Response:
        body = _parsed(await read_body(http), BatchBody)
        key, priority = _asked(http)
        new = NewBatch(
            ENDPOINTS[body.endpoint],
            body.input_file_id,
            dict(body.metadata or {}),
            priority,
            body.output_expires_after.seconds if body.output_expires_after else None,
        )
        return _json(batch(await self._batches.create(http[IDENTITY], new, key)))

    async def _list(self, http: web.Request) -> web.Response:
        limit = number(http, "limit", 1, MOST_LISTED, LISTED)
        found, more = await self._batches.page(http[IDENTITY].tenant, http.query.get("after"), limit)
        first, last = (found[0].id, found[-1].id) if found else (None, None)
        return _json(BatchList(data=[batch(state) for state in found], first_id=first, last_id=last, has_more=more))

    async def _batch(self, http: web.Request) -> web.Response:
        return _json(batch(await self._batches.state(http[IDENTITY].tenant, http.match_info["id"])))

    async def _cancel_batch(self, http: web.Request) -> web.Response:
        return _json(batch(await self._batches.cancel(http[IDENTITY].tenant, http.match_info["id"])))


def _asked(http: web.Request) -> tuple[str | None, int]:
    """Under which key, and how urgent it is."""
    caller = caller_of(http, None)
    return caller.idempotency_key, caller.ctx.priority if "X-Priority" in http.headers else JOB_PRIORITY


def _parsed(body: bytes, kind: type[S]) -> S:
    try:
        return msgspec.json.decode(body, type=kind)
    except msgspec.ValidationError as error:
        raise explain(str(error)) from None
    except (msgspec.DecodeError, RecursionError) as error:
        raise InvalidRequest(f"the body is not valid JSON: {error}") from None


def number(http: web.Request, name: str, least: int, most: int, default: int) -> int:
    text = http.query.get(name)
    return default if text is None else whole_number(name, text, least, most)


def whole_number(name: str, text: str, least: int, most: int) -> int:
    """Raises InvalidRequest."""
    if not (text.isascii() and text.isdigit() and len(text) < 10 and least <= int(text) <= most):
        raise InvalidRequest(f"{name} must be a whole number from {least} to {most}", param=name)
    return int(text)


def _json(content: msgspec.Struct) -> web.Response:
    return web.Response(body=msgspec.json.encode(content), content_type="application/json")
