"""What goes away, fills up or expires just when a job or a batch needs it."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from pdbus.bus.bus import memory_bus
from pdbus.bus.codec import encode
from pdbus.bus.memory import MemoryBroker
from pdbus.errors import NotFound, QuotaExceeded, Unavailable
from pdbus.messages.jobs import JobSpec
from pdbus.router.jobs.batch_log import BatchLog
from pdbus.router.jobs.batch_states import begun
from pdbus.router.jobs.batches import NewBatch
from pdbus.router.jobs.job_log import JobLog
from pdbus.router.jobs.progress import LOOK_AGAIN_S, Progress
from pdbus.router.jobs.states import LIFE_S
from pdbus.router.jobs.worker import JobWorker, unless
from pdbus.subjects import BATCH_JOBS, BATCHES, FILES, JOBS, RESULTS
from tests.support.job_world import ME, MODEL, World, lines_of


@pytest.fixture
async def w() -> AsyncIterator[World]:
    async with _world() as made:
        yield made


@asynccontextmanager
async def _world() -> AsyncIterator[World]:
    async with memory_bus(MemoryBroker()) as bus, Progress(bus) as progress:
        yield World(progress)


async def test_work_waits_for_a_log_that_is_away_and_is_not_done_again(w: World) -> None:
    """To give it back would count as one more router that died of it."""
    job = await w.submit()
    w.logs.faults, w.logs.lost_answers = 3, 1
    await w.work()
    assert len(w.answers.asked) == 1
    kept = w.logs.entries[RESULTS(tenant="t", job=job).name]
    assert [record.entry.status for record in kept] == ["queued", "completed"]


async def test_a_batch_waits_for_logs_that_are_away_and_knows_what_it_has_stored(w: World) -> None:
    batch = await w.batch(3)
    w.logs.faults, w.logs.lost_answers = 3, 3
    await w.work_batch()
    state = await w.batches.state("t", batch.id)
    assert (state.status, state.completed, len(w.answers.asked)) == ("completed", 3, 3)
    assert sorted(line.number for line in w.results(batch)) == [0, 1, 2]


async def test_a_file_without_its_beginning_is_not_there(w: World) -> None:
    """Pieces expire one after the other: the rest has other lines under the same numbers."""
    batch = await w.batch(4)
    pieces = w.logs.entries[FILES(tenant="t", file=batch.input_file).name]
    assert len(pieces) > 2
    del pieces[0]
    await w.work_batch()
    state = await w.batches.state("t", batch.id)
    assert (state.status, state.errors[0].code) == ("failed", "no_file")
    assert not w.answers.asked


async def test_a_late_batch_whose_file_is_gone_ends_too(w: World) -> None:
    batch = await w.batch(1)
    message = w.logs.queues[BATCH_JOBS(model=MODEL).name][0]
    state, seq = await BatchLog(w.logs, MODEL, w.shares, w.now).accepted(message.message.state)
    await BatchLog(w.logs, MODEL, w.shares, w.now).append(begun(state, 1, 0.0), seq)
    await w.files.delete("t", batch.input_file)
    w.now_s = LIFE_S + 1
    await w.work_batch()
    assert (await w.batches.state("t", batch.id)).status == "expired"


async def test_what_a_late_batch_tells_of_its_lines_fits_messages_however_long_their_ids(w: World) -> None:
    async def lines() -> AsyncIterator[bytes]:
        for number in range(520):
            line = {"custom_id": f"{number:03}" + "\U0001f600" * 509, "method": "POST", "url": "/v1/completions"}
            yield json.dumps({**line, "body": {}}).encode() + b"\n"

    async with w.batches.upload(ME, "a", 0) as upload:
        await upload.add(lines())
        file = await upload.finish("batch")
    batch = await w.batches.create(ME, NewBatch("completions", file.id, {}), None)
    message = w.logs.queues[BATCH_JOBS(model=MODEL).name][0]
    state, seq = await BatchLog(w.logs, MODEL, w.shares, w.now).accepted(message.message.state)
    await BatchLog(w.logs, MODEL, w.shares, w.now).append(begun(state, 520, 0.0), seq)
    w.now_s = LIFE_S + 1
    await w.work_batch()
    assert (await w.batches.state("t", batch.id)).failed == 520
    kept = w.logs.entries[BATCHES(tenant="t", batch=batch.id).name]
    assert max(len(encode(record.entry)) for record in kept) < 1 << 20


async def test_a_batch_of_an_old_file_ends_before_the_file_does(w: World) -> None:
    async with w.batches.upload(ME, "a", 0) as upload:
        await upload.add(lines_of(1))
        file = await upload.finish("batch")
    w.now_s = file.expires_s - 3600
    batch = await w.batches.create(ME, NewBatch("completions", file.id, {}), None)
    assert batch.expires_s == file.expires_s
    w.now_s = file.expires_s
    with pytest.raises(NotFound):
        await w.batches.create(ME, NewBatch("completions", file.id, {}), None)


async def test_answers_that_are_read_while_the_errors_are_deleted_are_told_once(w: World) -> None:
    """What is left of the log is stored anew, behind where the reader is."""
    w.answers.refuses = "1"
    batch = await w.batch(3)
    await w.work_batch()
    out, errors = (f"file-{batch.id}-{kind}" for kind in ("output", "errors"))
    told = [piece async for piece in w.batches.content("t", out)]
    reading, read = w.batches.content("t", out), list[bytes]()
    async for piece in reading:
        if not read:
            await w.batches.delete("t", errors)
        read.append(piece)
    assert len(told) > 1
    assert b"".join(read) == b"".join(told)
    assert len(w.logs.entries[BATCHES(tenant="t", batch=batch.id).name]) == 1


async def test_lines_without_room_for_an_answer_say_so_and_begin_nothing(w: World) -> None:
    batch = await w.batch(50)
    w.answers.fills = w.shares, 5
    await w.work_batch()
    state = await w.batches.state("t", batch.id)
    assert (state.status, state.total, state.completed + state.failed) == ("completed", 50, 50)
    assert state.failed >= 50 - 32
    assert len(w.answers.asked) == state.completed
    bad = [json.loads(line.data) for line in w.results(batch) if line.status_code == 0]
    assert {error["code"] for error in bad} == {"quota_exceeded"}


async def test_a_full_share_refuses_before_anything_is_stored_and_finds_what_is_there(w: World) -> None:
    known = await w.submit("known")
    batch = await w.batch(1)
    w.fill()
    with pytest.raises(QuotaExceeded, match="delete files"):
        await w.submit("new")
    with pytest.raises(QuotaExceeded):
        await w.batches.create(ME, NewBatch("completions", batch.input_file, {}), None)
    with pytest.raises(QuotaExceeded):
        async with w.batches.upload(ME, "a", 1):
            raise AssertionError
    assert await w.submit("known") == known
    assert len(w.logs.queues[JOBS(model=MODEL).name]) == 1
    await w.work()
    assert (await w.jobs.state("t", known)).status == "completed", "what was accepted is answered"


async def test_jobs_are_the_last_unless_more_is_asked_for_within_the_key_s_limit(w: World) -> None:
    for key, priority in (("a", 0), ("b", 3), ("c", 9)):
        await w.submit(key, priority)
    await w.work()
    assert [asked.priority for asked in w.answers.asked] == [0, 3, 6]
    batch = await w.batch(1)
    assert batch.priority == 0
    urgent = await w.batches.create(ME, NewBatch("completions", batch.input_file, {}, 9), None)
    assert urgent.priority == 6


async def test_the_priority_is_no_part_of_what_a_job_is(w: World) -> None:
    assert await w.submit("k", 0) == await w.submit("k", 5)


async def test_a_job_whose_router_fell_silent_is_told_as_queued_again() -> None:
    now_s = 0.0
    async with memory_bus(MemoryBroker()) as bus, Progress(bus, lambda: now_s) as progress:
        w = World(progress)
        job = await w.submit()
        await progress.tell("t", job, "running", 7)
        told = await w.jobs.state("t", job)
        assert (told.status, told.tokens) == ("running", 7)
        now_s = LOOK_AGAIN_S + 0.1
        told = await w.jobs.state("t", job)
        assert (told.status, told.tokens) == ("queued", 0)


async def test_a_message_that_is_taken_before_its_job_is_accepted_waits_for_that(w: World) -> None:
    """Both would say so at once otherwise, and the slower one would have to look who was quicker."""
    log = JobLog(w.logs, MODEL, w.shares, w.now)
    spec = JobSpec("t", "job-1", "completions", b"d" * 32, "", 0.0, LIFE_S)

    async def early() -> None:
        await JobWorker(log.patient(), w.answers, w.progress).work(await w.taken())  # type: ignore[arg-type]

    steps = w.logs.calls
    await asyncio.gather(log.submit(spec, b"1"), early())
    assert w.logs.calls - steps == 5, "a look, the message, two entries and the end of the message"
    assert [record.entry.status for record in w.logs.entries[RESULTS(tenant="t", job="job-1").name]] == [
        "queued", "completed",
    ]  # fmt: skip


@pytest.mark.parametrize("error", [Unavailable("away"), asyncio.CancelledError()])
async def test_a_submission_that_breaks_off_leaves_its_message_to_whoever_takes_it(
    w: World, error: BaseException
) -> None:
    log = JobLog(w.logs, MODEL, w.shares, w.now)
    spec = JobSpec("t", "job-1", "completions", b"d" * 32, "", 0.0, LIFE_S)
    w.logs.refuses = error
    submitting = asyncio.create_task(log.submit(spec, b"1"))
    await JobWorker(log.patient(), w.answers, w.progress).work(await w.taken())  # type: ignore[arg-type]
    with pytest.raises(type(error)):
        await submitting
    assert (await log.known("t", "job-1")).status == "completed"


async def test_a_watch_that_fails_is_no_end_of_the_job() -> None:
    async def over() -> bool:
        raise KeyError("a fault of ours")

    async def work() -> None:
        await asyncio.Event().wait()

    news = asyncio.Event()
    news.set()
    with pytest.raises(KeyError):
        await unless(work(), news, over)
