"""Batches: every line has one result, whatever dies, hangs or is cancelled; and what the lines of a file may be."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import suppress
from typing import Any, Literal

import hypothesis.strategies as st
import pytest
from hypothesis import given, settings

from pdbus.bus.bus import memory_bus
from pdbus.bus.memory import MemoryBroker
from pdbus.errors import Conflict, InvalidRequest, NotFound, Unavailable
from pdbus.messages.jobs import BatchLine, BatchState
from pdbus.router.jobs import lines
from pdbus.router.jobs.batch_log import BatchLog
from pdbus.router.jobs.batch_run import BatchWorker
from pdbus.router.jobs.batch_states import MOST_STALLED, to_cancel
from pdbus.router.jobs.execute import Asked, Outcome, Seen
from pdbus.router.jobs.files import FileStore
from pdbus.router.jobs.openai_jobs import batch, error_file, output_file
from pdbus.router.jobs.progress import Progress
from pdbus.router.jobs.shares import Shares
from pdbus.router.jobs.states import LIFE_S
from pdbus.subjects import BATCH_JOBS, BATCHES
from tests.support.durable import MemoryLogs

MODEL = "m"
BATCH = "batch_" + "0" * 32
When = Literal["before", "after"]


class Answers:
    """An executor: the answer to a line is the line; bodies that ask for it are refused."""

    def __init__(self) -> None:
        self.begun: list[str] = []

    async def run(self, asked: Asked, seen: Seen) -> Outcome:
        self.begun.append(asked.name)
        await asyncio.sleep(0)
        return Outcome(400 if b"refuse" in asked.body else 200, asked.body)


def line(number: int, **body: Any) -> bytes:
    read = {"custom_id": f"c{number}", "method": "POST", "url": "/v1/completions", "body": {"n": number, **body}}
    return json.dumps(read).encode() + b"\n"


async def pieces(content: bytes, size: int = 100) -> AsyncIterator[bytes]:
    for start in range(0, len(content), size):
        yield content[start : start + size]


class World:
    def __init__(self) -> None:
        self.logs, self.answers, self.now_s = MemoryLogs(), Answers(), 0.0
        self.shares = Shares(1 << 40, lambda: self.now_s)
        self.files = FileStore(self.logs, self.shares, lambda: self.now_s)

    @property
    def batches(self) -> BatchLog:
        """Each router has its own, and nothing survives it."""
        return BatchLog(self.logs, MODEL, self.shares, lambda: self.now_s)

    async def create(self, content: bytes) -> None:
        async with self.files.upload("t", "in.jsonl") as upload:
            await upload.add(pieces(content))
            file = await upload.finish("batch")
        state = BatchState(
            tenant="t", id=BATCH, key_id="", digest=b"d" * 32, endpoint="completions", input_file=file.id,
            created_s=0.0, expires_s=LIFE_S, since_s={"validating": 0.0},
        )  # fmt: skip
        await self.batches.create(state)

    async def work(self, routers: int = 1) -> None:
        messages = [self.logs.take(BATCH_JOBS(model=MODEL)) for _ in range(routers)]
        async with memory_bus(MemoryBroker()) as bus, Progress(bus) as progress:
            worker = BatchWorker(self.batches, self.files, self.answers, progress, self.shares)  # type: ignore[arg-type]
            async with asyncio.timeout(30), asyncio.TaskGroup() as group:
                for message in messages:
                    if message is not None:
                        group.create_task(worker.work(message))

    async def cancel(self) -> None:
        await self.batches.change("t", BATCH, lambda state: to_cancel(state, self.now_s))

    async def state(self) -> BatchState:
        return (await self.batches.known("t", BATCH))[0]

    def results(self) -> list[BatchLine]:
        entries = [record.entry for record in self.logs.entries[BATCHES(tenant="t", batch=BATCH).name]]
        assert not any(entry.state.final for entry in entries[:-1]), "something follows the end"
        return [line for entry in entries for line in entry.lines]


@settings(max_examples=60, deadline=None)
@given(
    crashes=st.lists(
        st.tuples(st.integers(1, 40), st.sampled_from(["before", "after"]), st.integers(1, 3)), max_size=6
    ),
    cancel_after=st.none() | st.integers(0, 6),
    count=st.integers(1, 70),
)
def test_every_line_has_one_result_whatever_dies(
    crashes: list[tuple[int, When, int]], cancel_after: int | None, count: int
) -> None:
    async def run() -> None:
        w = World()
        await w.create(b"".join(line(number, **({"refuse": 1} if number % 5 == 4 else {})) for number in range(count)))
        cancelled = False
        for at, (step, when, routers) in enumerate(crashes):
            if at == cancel_after and not (await w.state()).final:
                await w.cancel()
                cancelled = True
                begun = len(w.answers.begun)
            w.logs.crash_at(step, when)
            with suppress(BaseExceptionGroup):  # of a Crash: nothing else is expected of a group
                await w.work(routers)
            w.logs.crash = None
        await w.work()
        state, results = await w.state(), w.results()
        assert state.final
        assert len({result.number for result in results}) == len(results), "a line has two results"
        assert state.completed == sum(result.status_code == 200 for result in results)
        assert state.failed == sum(result.status_code != 200 for result in results)
        if cancelled:
            assert state.status == "cancelled"
            assert len(w.answers.begun) == begun
        else:
            assert (state.status, state.total, len(results)) == ("completed", count, count)
            assert {result.number: json.loads(result.data)["n"] for result in results} == {n: n for n in range(count)}
        assert not w.logs.queues[BATCH_JOBS(model=MODEL).name]

    asyncio.run(run())


async def test_a_file_of_answers_is_as_long_as_it_says() -> None:
    w = World()
    await w.create(b"\n".join([line(0), line(1, refuse=1), line(2), b"   ", line(3)]))
    assert output_file(await w.state()) is None
    await w.work()
    state = await w.state()
    out, bad = output_file(state), error_file(state)
    assert out is not None
    assert bad is not None
    written = {kind: b"".join(lines.output(state.id, it) for it in w.results() if (it.status_code == 200) == kind)
               for kind in (True, False)}  # fmt: skip
    assert (out.bytes, bad.bytes) == (len(written[True]), len(written[False]))
    assert batch(state).request_counts.failed == 1
    assert [json.loads(raw)["custom_id"] for raw in written[False].splitlines()] == ["c1"]


async def test_what_is_late_gets_an_error_and_what_is_answered_stays() -> None:
    w = World()
    await w.create(b"".join(line(number) for number in range(3)))
    w.now_s = LIFE_S + 1
    await w.work()
    state = await w.state()
    assert (state.status, state.completed) == ("expired", 0)
    assert not w.answers.begun


async def test_a_batch_that_every_router_dies_of_fails_and_says_so() -> None:
    w = World()
    await w.create(line(0))
    for _ in range(MOST_STALLED):
        w.logs.crash_at(2, "before")
        with pytest.raises(BaseExceptionGroup):
            await w.work()
        w.logs.crash = None
    await w.work()
    state = await w.state()
    assert state.status == "failed"
    assert state.errors[0].code == "stalled"


async def test_a_file_deleted_in_the_meantime_fails_the_batch() -> None:
    w = World()
    await w.create(line(0))
    await w.files.delete("t", (await w.state()).input_file)
    await w.work()
    state = await w.state()
    assert (state.status, state.errors[0].code) == ("failed", "no_file")


async def test_what_has_ended_can_not_be_cancelled() -> None:
    w = World()
    await w.create(line(0))
    await w.work()
    with pytest.raises(Conflict):
        await w.cancel()


async def test_a_file_that_breaks_off_is_not_there() -> None:
    w = World()

    async def broken() -> AsyncIterator[bytes]:
        yield b"x" * 2_000_000
        raise Unavailable("gone")

    with pytest.raises(Unavailable):
        async with w.files.upload("t", "a") as upload:
            await upload.add(broken())
    (kept,) = w.logs.entries.values()
    assert [record.entry.deleted for record in kept] == [True]
    with pytest.raises(NotFound):
        await w.files.meta("t", next(iter(w.logs.entries)).rpartition(".")[2])


@given(content=st.lists(st.binary(max_size=20)), size=st.integers(1, 7))
def test_lines_do_not_depend_on_how_they_are_cut(content: list[bytes], size: int) -> None:
    async def read() -> list[tuple[int, bytes]]:
        return [found async for found in lines.split(pieces(b"\n".join(content), size))]

    whole = b"\n".join(content).split(b"\n")
    assert asyncio.run(read()) == [(at, raw) for at, raw in enumerate(whole) if raw.strip()]


@given(raw=st.binary(max_size=200) | st.text(max_size=100).map(str.encode) | st.just(b"[" * 100_000))
def test_no_line_is_too_odd_to_be_refused(raw: bytes) -> None:
    with pytest.raises(InvalidRequest) as caught:
        lines.parse(0, raw, "completions")
    assert caught.value.param in ("invalid_json_line", "invalid_request", "mismatched_url")


async def test_a_line_without_end_is_refused_before_it_fills_the_memory() -> None:
    taken = 0

    async def endless() -> AsyncIterator[bytes]:
        nonlocal taken
        while True:
            taken += 1
            yield b"x" * 65_536

    with pytest.raises(InvalidRequest):
        async for _ in lines.split(endless()):
            pass
    assert taken <= lines.LONGEST_LINE // 65_536 + 1
