"""How a batch goes on. Pure: times are passed in."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import replace
from typing import Final

import msgspec

from pdbus.errors import Conflict
from pdbus.messages.jobs import BatchError, BatchLine, BatchState, BatchStatus, BatchUsage
from pdbus.router.jobs.lines import output

MOST_STALLED: Final = 10
"""Routers that die, or are stopped, without a line getting an answer in between."""


def now_in(state: BatchState, status: BatchStatus, now_s: float) -> BatchState:
    return replace(state, status=status, since_s={**state.since_s, status: now_s})


def begun(state: BatchState, total: int, now_s: float) -> BatchState:
    """Its file was read, and every line is a request."""
    return replace(now_in(state, "in_progress", now_s), total=total)


def refused(state: BatchState, errors: Sequence[BatchError], now_s: float) -> BatchState:
    return replace(now_in(state, "failed", now_s), errors=tuple(errors))


def with_lines(state: BatchState, lines: Collection[BatchLine], deliveries: int) -> BatchState:
    """More lines have their results."""
    good = [line for line in lines if line.status_code == 200]
    bad = [line for line in lines if line.status_code != 200]
    return replace(
        state,
        completed=state.completed + len(good),
        failed=state.failed + len(bad),
        output_bytes=state.output_bytes + sum(len(output(state.id, line)) for line in good),
        error_bytes=state.error_bytes + sum(len(output(state.id, line)) for line in bad),
        deliveries=deliveries,
        usage=_with_answers(state.usage, [line.data for line in good]),
    )


class _Details(msgspec.Struct):
    cached_tokens: int = 0


class _Usage(msgspec.Struct):
    prompt_tokens: int = 0
    completion_tokens: int = 0
    prompt_tokens_details: _Details | None = None


class _Answer(msgspec.Struct):
    usage: _Usage | None = None


def _with_answers(usage: BatchUsage, answers: Sequence[bytes]) -> BatchUsage:
    told = [found for data in answers if (found := msgspec.json.decode(data, type=_Answer).usage)]
    return BatchUsage(
        usage.input_tokens + sum(one.prompt_tokens for one in told),
        usage.cached_tokens + sum(one.prompt_tokens_details.cached_tokens for one in told if one.prompt_tokens_details),
        usage.output_tokens + sum(one.completion_tokens for one in told),
    )


def ended(state: BatchState, status: BatchStatus, now_s: float) -> BatchState:
    if status == "completed":
        state = now_in(state, "finalizing", now_s)
    return now_in(state, status, now_s)


def to_cancel(state: BatchState, now_s: float) -> BatchState | None:
    """None: it is on its way there. Raises Conflict where it has ended otherwise."""
    if state.status in ("cancelling", "cancelled"):
        return None
    if state.final:
        raise Conflict(f"a batch that is {state.status} can't be cancelled")
    return now_in(state, "cancelling", now_s)
