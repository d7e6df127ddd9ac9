"""What a client raises in the end, and how it waits before it asks again."""

from __future__ import annotations

import random

import pytest

from pdbus.backoff import RetryBudget
from pdbus.client.retries import Retries
from pdbus.context import Deadline, RequestContext
from pdbus.errors import DeadlineExceeded, InvalidRequest, PdbusError, Unavailable

NOBODY = Unavailable("nobody is there")
LATE = DeadlineExceeded("no answer in time")


def retries(timeout_s: float = 60.0) -> Retries:
    return Retries(RetryBudget(0.0), random.Random(1), RequestContext(Deadline.after(timeout_s)))


async def raised(asked: Retries, error: PdbusError) -> PdbusError:
    with pytest.raises(PdbusError) as caught:
        await asked.failed(error)
    return caught.value


async def test_what_can_be_repeated_is():
    await retries().failed(NOBODY)


async def test_what_cannot_be_repeated_is_raised_at_once():
    error = InvalidRequest("no such field")
    assert await raised(retries(), error) is error


async def test_no_time_is_left():
    assert await raised(retries(timeout_s=0.0), NOBODY) is NOBODY


async def test_an_attempt_cut_short_by_the_deadline_does_not_hide_what_was_wrong():
    asked = retries()
    await asked.failed(NOBODY)
    assert await raised(asked, LATE) is NOBODY


async def test_of_an_answer_that_had_begun_only_the_deadline_is_to_blame():
    asked = retries()
    await asked.failed(NOBODY)
    asked.progressed()
    assert await raised(asked, LATE) is LATE


async def test_another_refusal_counts_more_than_what_was_before():
    asked, error = retries(), InvalidRequest("no such field")
    await asked.failed(NOBODY)
    assert await raised(asked, error) is error
