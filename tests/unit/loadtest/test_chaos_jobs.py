"""A caller of the chaos test that submits a job holds the service to one job under one key, with one result."""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from typing import Any

import aiohttp
import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer, unused_port

from loadtest.chaos.asking import HttpCaller, Told
from loadtest.chaos.jobs import ask_job
from loadtest.chaos.questions import Question

QUESTION = Question("completions", {"prompt": "x", "max_tokens": 3})
DONE = {"body": {"choices": [{"token_ids": [1, 2, 3], "text": "abc"}]}}


def router(ids: Callable[[int], str], ending: str = "completed") -> web.Application:
    """Has each job's result at the second look; `ids`: by how often one was submitted."""
    submitted, looked = 0, 0

    def told(id_: str) -> web.Response:
        response = DONE if looked > 1 else None
        return web.json_response({"id": id_, "status": ending if response else "queued", "response": response})

    async def submit(request: web.Request) -> web.Response:
        nonlocal submitted
        submitted += 1
        asked = await request.json()
        assert request.headers["Idempotency-Key"]
        assert asked == {"endpoint": "/v1/completions", "body": {**QUESTION.body, "model": "m"}}
        return told(ids(submitted))

    async def look(request: web.Request) -> web.Response:
        nonlocal looked
        looked += 1
        return told(request.match_info["id"])

    app = web.Application()
    app.add_routes([web.post("/v1/jobs", submit), web.get("/v1/jobs/{id}", look)])
    return app


async def asked(app: web.Application, *more_urls: str) -> Told:
    async with TestServer(app) as server, aiohttp.ClientSession() as http:
        urls = [*more_urls, str(server.make_url("/")).rstrip("/")]
        told = Told(0, "job", time.monotonic())
        await ask_job(HttpCaller(http, "m", lambda: urls, random.Random(1)), QUESTION, told)
        return told


async def test_a_job_is_waited_for_and_its_answer_is_told() -> None:
    told = await asked(router(lambda submitted: "job-1"))
    assert (told.failed, told.ids, told.texts) == ("", ((1, 2, 3),), ["abc"])


async def test_a_router_that_is_gone_is_passed_over() -> None:
    told = await asked(router(lambda submitted: "job-1"), f"http://127.0.0.1:{unused_port()}")
    assert (told.failed, told.ids) == ("", ((1, 2, 3),))


@pytest.mark.parametrize(
    ("app", "why"),
    [
        (router(lambda submitted: f"job-{submitted}"), "is job-2"),
        (router(lambda submitted: "job-1", ending="failed"), "job-1 failed"),
    ],
)
async def test_a_second_job_and_one_that_failed_are_told(app: Any, why: str) -> None:
    assert why in (await asked(app)).failed
