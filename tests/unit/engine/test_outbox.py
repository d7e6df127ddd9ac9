"""One frame for each router, and every item again until its end is acknowledged."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from pdbus.bus.codec import encode
from pdbus.engine.outbox import KEEP_FINISHED_S, MOST_ITEMS, Outbox
from pdbus.messages.router import TokenItem, TokenLogprob
from pdbus.messages.workers import Cancel, Resend


def item(index: int, request: str = "r", attempt: int = 1, **fields: object) -> TokenItem:
    return replace(TokenItem(request, 0, attempt, bytes(32), index, (100 + index,)), **fields)  # type: ignore[arg-type]


def test_items_of_one_router_share_a_numbered_frame() -> None:
    outbox = Outbox("w", "life")
    for router, request in (("a", "r1"), ("b", "r2"), ("a", "r3")):
        outbox.put(router, item(0, request), 0.0)
    frames = dict(outbox.take())
    assert [one.request_id for one in frames["a"].items] == ["r1", "r3"]
    assert (frames["a"].worker, frames["a"].incarnation, frames["a"].seq) == ("w", "life", 0)
    assert outbox.take() == []
    outbox.put("a", item(1, "r1"), 0.0)
    assert [frame.seq for _, frame in outbox.take()] == [1]


@given(st.integers(0, 30), st.integers(0, 32))
def test_a_resend_repeats_everything_from_an_index_on(count: int, start: int) -> None:
    outbox = Outbox("w", "life")
    for index in range(count):
        outbox.put("a", item(index), 0.0)
    reply = outbox.resend(Resend("r", 0, 1, start))
    assert reply.state == ("running" if count else "unknown")
    assert [one.index for one in reply.items] == list(range(start, count))
    outbox.put("a", item(count, finish="length"), 0.0)
    reply = outbox.resend(Resend("r", 0, 1, start))
    assert reply.state == "finished"
    assert reply.items[-1].finish == "length"


def test_items_are_forgotten_when_the_end_is_acknowledged_or_nobody_asks_for_long() -> None:
    outbox = Outbox("w", "life")
    outbox.put("a", item(0, finish="stop"), 0.0)
    outbox.put("a", item(0, "other", attempt=2), 0.0)
    outbox.acknowledge(Cancel("other", 1, "a", ("w",), 0, "finished"))
    outbox.expire(KEEP_FINISHED_S - 0.1)
    assert len(outbox) == 2
    outbox.expire(KEEP_FINISHED_S)
    assert outbox.resend(Resend("r", 0, 1, 0)).state == "unknown"
    outbox.acknowledge(Cancel("other", 2, "a", ("w",), 0, "finished"))
    assert len(outbox) == 0


def test_an_attempt_that_is_closed_without_an_end_expires_too() -> None:
    outbox = Outbox("w", "life")
    outbox.put("a", item(0), 0.0)
    outbox.close("r", 0, 1, 5.0)
    outbox.close("r", 0, 1, 50.0)
    outbox.expire(5.0 + KEEP_FINISHED_S)
    assert len(outbox) == 0


def test_an_answer_to_a_cancel_is_not_kept() -> None:
    outbox = Outbox("w", "life")
    outbox.put("a", item(-1, finish="cancelled", ids=()), 0.0)
    assert len(outbox.take()) == 1
    assert len(outbox) == 0


def test_frames_fit_into_a_message() -> None:
    outbox = Outbox("w", "life")
    logprobs = (TokenLogprob(-1.5, tuple((50_000 + at, -2.5) for at in range(20))),)
    for index in range(2 * MOST_ITEMS + 1):
        outbox.put("a", item(index, logprobs=logprobs), 0.0)
    outbox.put("a", item(0, "p", prompt_logprobs=logprobs), 0.0)
    outbox.put("a", item(1, "p"), 0.0)
    frames = [frame for _, frame in outbox.take()]
    assert [len(frame.items) for frame in frames] == [MOST_ITEMS, MOST_ITEMS, 1, 1, 1]
    assert max(len(encode(frame)) for frame in frames) < 1 << 20
    reply = outbox.resend(Resend("r", 0, 1, 0))
    assert (len(reply.items), reply.state) == (MOST_ITEMS, "running")


def test_a_router_that_is_gone_gets_nothing_more() -> None:
    outbox = Outbox("w", "life")
    outbox.put("a", item(0), 0.0)
    outbox.forget_router("a")
    assert outbox.take() == []
