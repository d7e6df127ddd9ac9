"""Jobs, batches and files of one tenant on logs in memory, for what may happen to them at awkward times."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator

from pdbus.messages.jobs import BatchLine, BatchState, JobSubmit, JobWork
from pdbus.router.identity import Identity, Quota
from pdbus.router.jobs.batch_log import BatchLog
from pdbus.router.jobs.batch_run import BatchWorker
from pdbus.router.jobs.batches import Batches, NewBatch
from pdbus.router.jobs.durable import Patient
from pdbus.router.jobs.execute import Asked, Outcome, Seen
from pdbus.router.jobs.files import FileStore
from pdbus.router.jobs.job_log import JobLog
from pdbus.router.jobs.progress import Progress
from pdbus.router.jobs.shares import Shares
from pdbus.router.jobs.told import Jobs
from pdbus.router.jobs.worker import JobWorker
from pdbus.router.quotas import Quotas
from pdbus.subjects import BATCH_JOBS, BATCHES, JOBS, RESULTS
from tests.support.durable import MemoryLogs, Message

MODEL, ROOM = "m", 1 << 30
ME = Identity("t", Quota(), priority_most=6, key_id="k")


class Answers:
    """An executor. `fills`: these shares are used up by its so manyth answer."""

    def __init__(self) -> None:
        self.asked: list[Asked] = []
        self.fills: tuple[Shares, int] | None = None
        self.refuses = ""
        """The number of a line."""

    def check(self, endpoint: str, body: bytes) -> None: ...

    async def run(self, asked: Asked, seen: Seen) -> Outcome:
        self.asked.append(asked)
        await asyncio.sleep(0)
        if self.fills and len(self.asked) == self.fills[1]:
            self.fills[0].uses[RESULTS.stream].stored("t", "", ROOM, 0.0)
        return Outcome(400 if asked.name.endswith(f"-{self.refuses}") else 200, b'{"text": "1"}')


class World:
    def __init__(self, progress: Progress) -> None:
        self.logs, self.answers, self.now_s, self.progress = MemoryLogs(), Answers(), 0.0, progress
        self.shares = Shares(ROOM, self.now)
        self.jobs = Jobs(self.job_log, self.answers, progress, Quotas())  # type: ignore[arg-type]
        self.files = FileStore(self.logs, self.shares, self.now)
        batches = BatchLog(self.logs, MODEL, self.shares, self.now)
        self.batches = Batches(batches, self.files, progress, Quotas(), self.shares)

    def now(self) -> float:
        return self.now_s

    @property
    def job_log(self) -> JobLog:
        return JobLog(Patient(self.logs), MODEL, self.shares, self.now)

    def fill(self) -> None:
        self.shares.uses[RESULTS.stream].stored("t", "", ROOM, self.now_s)

    async def submit(self, key: str = "k", priority: int = 0) -> str:
        return (await self.jobs.submit(JobSubmit("completions", {"n": 1}, key, {}, priority), ME)).id

    async def work(self) -> None:
        while (message := self.logs.take(JOBS(model=MODEL))) is not None:
            await JobWorker(self.job_log, self.answers, self.progress).work(message)  # type: ignore[arg-type]
            assert message.deliveries == 1

    async def taken(self) -> Message[JobWork]:
        """A message, as soon as there is one: nobody tells of it."""
        while (message := self.logs.take(JOBS(model=MODEL))) is None:  # noqa: ASYNC110 - as it says
            await asyncio.sleep(0)
        return message

    async def batch(self, count: int) -> BatchState:
        async with self.batches.upload(ME, "a", 0) as upload:
            await upload.add(lines_of(count))
            file = await upload.finish("batch")
        return await self.batches.create(ME, NewBatch("completions", file.id, {}), None)

    async def work_batch(self) -> None:
        message = self.logs.take(BATCH_JOBS(model=MODEL))
        assert message is not None
        patient = Patient(self.logs)
        batches, files = BatchLog(patient, MODEL, self.shares, self.now), FileStore(patient, self.shares, self.now)
        worker = BatchWorker(batches, files, self.answers, self.progress, self.shares)  # type: ignore[arg-type]
        async with asyncio.timeout(20):
            await worker.work(message)
        assert not self.logs.queues[BATCH_JOBS(model=MODEL).name]

    def results(self, batch: BatchState) -> list[BatchLine]:
        kept = self.logs.entries[BATCHES(tenant="t", batch=batch.id).name]
        return [line for record in kept for line in record.entry.lines]


async def lines_of(count: int) -> AsyncIterator[bytes]:
    for number in range(count):
        line = {"custom_id": f"{number}", "method": "POST", "url": "/v1/completions", "body": {"pad": "x" * 300_000}}
        yield json.dumps(line).encode() + b"\n"
