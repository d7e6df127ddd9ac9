"""A request as a durable job: whoever submitted it has one result, whatever dies before, between and after."""

from __future__ import annotations

import asyncio
import time
from typing import Any

import aiohttp

from loadtest.chaos.asking import Again, Failed, HttpCaller, Told, refusal
from loadtest.chaos.questions import Question
from pdbus.backoff import backoff_s

JOB_S = 100.0
_WAIT_S = 5
_PATIENCE_S = 10.0
"""For one answer: a router that gives none is taken for dead."""


async def ask_job(caller: HttpCaller, question: Question, told: Told) -> None:
    """Submits it and reads its result, each until some router answers, and submits it once more in the end: under one
    key there has to be one job."""
    submission = {"endpoint": question.path, "body": {**question.body, "model": caller.model}}
    headers = {"Idempotency-Key": f"{caller.rng.getrandbits(64):x}"}
    told.begin(question.choices)
    try:
        job = await _answered(caller, told, "POST", "/v1/jobs", json=submission, headers=headers)
        id_ = job["id"]
        while job["response"] is None:
            if job["status"] == "cancelled":
                raise Failed(f"the job {id_} was cancelled by nobody")
            job = await _answered(caller, told, "GET", f"/v1/jobs/{id_}?wait={_WAIT_S}")
        again = await _answered(caller, told, "POST", "/v1/jobs", json=submission, headers=headers)
        if again["id"] != id_ or again["response"] != job["response"]:
            raise Failed(f"submitted again under its key, the job {id_} is {again['id']}, or ended otherwise")
        if job["status"] != "completed":
            raise Failed(f"the job {id_} {job['status']}: {job['response']['body']}")
        told.whole(job["response"]["body"])
    except Failed as reason:
        told.failed = f"{reason}"


async def _answered(caller: HttpCaller, told: Told, method: str, path: str, **asked: Any) -> dict[str, Any]:
    """Raises Failed, also where no router answers in time."""
    avoid, retries, why = "", 0, "its time was up"
    while time.monotonic() < told.sent_s + JOB_S:
        url = caller.router(avoid)
        try:
            timeout = aiohttp.ClientTimeout(_PATIENCE_S, sock_connect=2.0)
            async with caller.http.request(method, url + path, timeout=timeout, **asked) as reply:
                if reply.status == 200:
                    answer: dict[str, Any] = await reply.json()
                    return answer
                raise refusal(await reply.read(), reply.headers)
        except (aiohttp.ClientError, TimeoutError, OSError, ValueError) as error:
            avoid, why, after_s = url, f"{type(error).__name__}: {error}", 0.0
        except Again as reason:
            avoid, why, after_s = url, f"{reason}", reason.after_s
        retries, told.tries = retries + 1, told.tries + 1
        await asyncio.sleep(max(backoff_s(retries, caller.rng), after_s))
    raise Failed(f"{method} {path.partition('?')[0]}: {why}")
