"""/v1/jobs and /v1/batches."""

from __future__ import annotations

from typing import TypeVar

import msgspec
from aiohttp import web

from pdbus.context import new_id
from pdbus.errors import InvalidRequest
from pdbus.messages.jobs import JobSubmit
from pdbus.router.http_body import read_body
from pdbus.router.http_caller import IDENTITY, caller_of
from pdbus.router.jobs.batches import Batches
from pdbus.router.jobs.lines import ENDPOINTS
from pdbus.router.jobs.openai_jobs import BatchBody, BatchList, JobBody, batch, job
from pdbus.router.jobs.told import Jobs
from pdbus.router.openai_reasons import explain

S = TypeVar("S", bound=msgspec.Struct)
LONGEST_WAIT_S = 60.0
_MOST_LISTED = 100
_LISTED = 20


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
        key = caller_of(http, None).idempotency_key
        asked = JobSubmit(
            ENDPOINTS[body.endpoint], body.body, new_id() if key is None else key, dict(body.metadata or {})
        )
        return _json(job(await self._jobs.submit(asked, http[IDENTITY])))

    async def _state(self, http: web.Request) -> web.Response:
        wait_s = _number(http, "wait", 0, int(LONGEST_WAIT_S), 0)
        return _json(job(await self._jobs.state(http[IDENTITY].tenant, http.match_info["id"], wait_s)))

    async def _cancel(self, http: web.Request) -> web.Response:
        return _json(job(await self._jobs.cancel(http[IDENTITY].tenant, http.match_info["id"])))

    async def _create(self, http: web.Request) -> web.Response:
        body = _parsed(await read_body(http), BatchBody)
        key = caller_of(http, None).idempotency_key
        metadata = dict(body.metadata or {})
        state = await self._batches.create(http[IDENTITY], ENDPOINTS[body.endpoint], body.input_file_id, metadata, key)
        return _json(batch(state))

    async def _list(self, http: web.Request) -> web.Response:
        limit = _number(http, "limit", 1, _MOST_LISTED, _LISTED)
        found, more = await self._batches.page(http[IDENTITY].tenant, http.query.get("after"), limit)
        first, last = (found[0].id, found[-1].id) if found else (None, None)
        return _json(BatchList(data=[batch(state) for state in found], first_id=first, last_id=last, has_more=more))

    async def _batch(self, http: web.Request) -> web.Response:
        return _json(batch(await self._batches.state(http[IDENTITY].tenant, http.match_info["id"])))

    async def _cancel_batch(self, http: web.Request) -> web.Response:
        return _json(batch(await self._batches.cancel(http[IDENTITY].tenant, http.match_info["id"])))


def _parsed(body: bytes, kind: type[S]) -> S:
    try:
        return msgspec.json.decode(body, type=kind)
    except msgspec.ValidationError as error:
        raise explain(str(error)) from None
    except (msgspec.DecodeError, RecursionError) as error:
        raise InvalidRequest(f"the body is not valid JSON: {error}") from None


def _number(http: web.Request, name: str, least: int, most: int, default: int) -> int:
    text = http.query.get(name)
    if text is None:
        return default
    if not (text.isascii() and text.isdigit() and len(text) < 10 and least <= int(text) <= most):
        raise InvalidRequest(f"{name} must be a whole number from {least} to {most}", param=name)
    return int(text)


def _json(content: msgspec.Struct) -> web.Response:
    return web.Response(body=msgspec.json.encode(content), content_type="application/json")
