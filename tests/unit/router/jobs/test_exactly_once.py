"""However routers die, whatever comes twice: what was accepted has one result, and what was cancelled none other."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any, Literal, TypeVar

import hypothesis.strategies as st
import pytest
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from pdbus.bus.bus import memory_bus
from pdbus.bus.memory import MemoryBroker
from pdbus.errors import Conflict, InvalidRequest, NotFound
from pdbus.messages.jobs import JobEntry, JobSpec, JobWork
from pdbus.router.jobs.execute import Asked, Outcome, Seen
from pdbus.router.jobs.job_log import JobLog
from pdbus.router.jobs.progress import Progress
from pdbus.router.jobs.shares import Shares
from pdbus.router.jobs.states import LIFE_S, MOST_DELIVERIES, body_digest, job_id, verdict
from pdbus.router.jobs.worker import JobWorker
from pdbus.subjects import JOBS, RESULTS
from tests.support.durable import Crash, MemoryLogs

T = TypeVar("T")
When = Literal["before", "after"]
MODEL = "m"
crashes = st.none() | st.tuples(st.integers(1, 8), st.sampled_from(["before", "after"]))


class Answers:
    """An executor: what it ran, and a crash in the middle of it."""

    def __init__(self) -> None:
        self.begun: list[str] = []
        self.crash = False

    async def run(self, asked: Asked, seen: Seen) -> Outcome:
        self.begun.append(asked.name)
        await asyncio.sleep(0)
        if self.crash:
            raise Crash
        return Outcome(200, b'"%b"' % asked.name.encode())


def spec(key: str, body: bytes, now_s: float) -> JobSpec:
    return JobSpec("t", job_id("t", key), "completions", body_digest("completions", body), "", now_s, now_s + LIFE_S)


class Jobs(RuleBasedStateMachine):
    @initialize()
    def begin(self) -> None:
        self.runner = asyncio.Runner()
        self.now_s = 0.0
        self.logs = MemoryLogs()
        self.answers = Answers()
        self.accepted: dict[str, bytes] = {}
        """What a caller was told is accepted: its body's digest."""
        self.cancelled: set[str] = set()
        """Cancelled before they had a result."""
        self.finals: dict[str, JobEntry] = {}

    def teardown(self) -> None:
        if hasattr(self, "runner"):
            self.finish()
            self.runner.close()

    def jobs(self) -> JobLog:
        """Each router has its own, and nothing survives it."""
        return JobLog(self.logs, MODEL, Shares(1 << 40), lambda: self.now_s)

    def crashed(self, work: Coroutine[Any, Any, T], crash: tuple[int, When] | None) -> T | None:
        if crash is not None:
            self.logs.crash_at(*crash)
        try:
            return self.runner.run(work)
        except Crash:
            return None
        finally:
            self.logs.crash = None

    @rule(key=st.sampled_from("abc"), body=st.sampled_from([b"1", b"2"]), crash=crashes)
    def submit(self, key: str, body: bytes, crash: tuple[int, When] | None) -> None:
        asked = spec(key, body, self.now_s)
        try:
            told = self.crashed(self.jobs().submit(asked, body), crash)
        except Conflict:
            assert self.entries(asked.id)[-1].spec.digest != asked.digest
            return
        if told is not None:
            assert told.spec.digest == asked.digest
            assert self.accepted.setdefault(asked.id, asked.digest) == asked.digest

    @rule(at=st.integers(0, 5), crash=crashes, mid=st.booleans())
    def work(self, at: int, crash: tuple[int, When] | None, mid: bool) -> None:
        self.answers.crash = mid
        self.crashed(self._work(at), crash)
        self.answers.crash = False

    @rule(first=st.integers(0, 5), crash=crashes)
    def two_at_once(self, first: int, crash: tuple[int, When] | None) -> None:
        """A message that was given out again while the router that has it still works on it."""

        async def both() -> None:
            await asyncio.gather(self._work(first), self._work(first))

        self.crashed(both(), crash)

    @rule(key=st.sampled_from("abc"), body=st.sampled_from([b"1", b"2"]), after=st.integers(0, 6), crash=crashes)
    def submit_and_work(self, key: str, body: bytes, after: int, crash: tuple[int, When] | None) -> None:
        """The router that takes a job in also takes its message, at any moment of that."""
        asked, log = spec(key, body, self.now_s), self.jobs()

        async def early() -> None:
            for _ in range(after):
                await asyncio.sleep(0)
            await self._work(0, log)

        async def both() -> None:
            submitted, worked = await asyncio.gather(log.submit(asked, body), early(), return_exceptions=True)
            for failed in (submitted, worked):
                if isinstance(failed, BaseException) and not isinstance(failed, Conflict):
                    raise failed
            if isinstance(submitted, JobEntry):
                assert self.accepted.setdefault(asked.id, asked.digest) == submitted.spec.digest

        self.crashed(both(), crash)

    @rule(key=st.sampled_from("abc"), crash=crashes)
    def cancel(self, key: str, crash: tuple[int, When] | None) -> None:
        async def work() -> JobEntry:
            known = await self.jobs().known("t", job_id("t", key))
            return await self.jobs().end(known.spec, "cancelled")

        try:
            told = self.crashed(work(), crash)
        except NotFound:
            return
        if told is not None and told.status == "cancelled" and told.spec.id not in self.cancelled:
            self.cancelled.add(told.spec.id)
            self.answers.begun = [name for name in self.answers.begun if name != told.spec.id]

    @rule(hours=st.integers(1, 30))
    def time_passes(self, hours: int) -> None:
        self.now_s += hours * 3600

    async def _work(self, at: int, log: JobLog | None = None) -> None:
        message = self.logs.take(JOBS(model=MODEL), at)
        if message is None:
            return
        async with memory_bus(MemoryBroker()) as bus, Progress(bus) as progress:
            worker = JobWorker((log or self.jobs()).patient(), self.answers, progress)  # type: ignore[arg-type]
            await worker.work(message)

    def entries(self, job: str) -> list[JobEntry]:
        return [record.entry for record in self.logs.entries.get(RESULTS(tenant="t", job=job).name, ())]

    @invariant()
    def nothing_follows_a_result(self) -> None:
        for kept in getattr(self, "logs", MemoryLogs()).entries.values():
            finals = [record.entry for record in kept if record.entry.final]
            assert len(finals) <= 1
            assert not finals or kept[-1].entry is finals[0]
            for final in finals:
                assert self.finals.setdefault(final.spec.id, final) is final, "a result changed"
            assert len({record.entry.spec.digest for record in kept}) == 1

    @invariant()
    def what_was_cancelled_is_not_begun(self) -> None:
        for job in getattr(self, "cancelled", ()):
            assert self.entries(job)[-1].status == "cancelled"
            assert job not in self.answers.begun

    def finish(self) -> None:
        while self.logs.queues.get(JOBS(model=MODEL).name):
            self.runner.run(self._work(0))
        for job, digest in self.accepted.items():
            kept = self.entries(job)
            assert kept[-1].final, "accepted, and never answered"
            assert kept[-1].spec.digest == digest
        self.nothing_follows_a_result()
        self.what_was_cancelled_is_not_begun()


Jobs.TestCase.settings = settings(max_examples=40, stateful_step_count=20, deadline=None)
TestJobs = Jobs.TestCase


def entry(status: Literal["queued", "completed"], of: JobSpec) -> JobEntry:
    return JobEntry(status, of, 0.0)


def test_what_a_message_of_the_queue_means() -> None:
    one, other = spec("k", b"1", 0.0), spec("k", b"2", 0.0)
    assert one.id == other.id
    assert verdict(one, None, 1, 1.0) == "run"
    assert verdict(one, entry("queued", one), 1, 1.0) == "run"
    assert verdict(one, entry("queued", other), 1, 1.0) == "drop", "lost against another body under its key"
    assert verdict(one, entry("completed", one), 1, 1.0) == "drop"
    assert verdict(one, entry("completed", one), 99, LIFE_S + 1) == "drop", "a result stays as it is"
    assert verdict(one, entry("queued", one), 1, LIFE_S) == "expired"
    assert verdict(one, entry("queued", one), MOST_DELIVERIES + 1, 1.0) == "given_up"


def test_a_job_s_name_is_of_its_tenant_and_key_alone() -> None:
    assert job_id("a", "k") == job_id("a", "k")
    assert len({job_id("a", "k"), job_id("b", "k"), job_id("a", "l"), job_id("", "ak")}) == 4
    for key in ("", "x" * 256):
        with pytest.raises(InvalidRequest):
            job_id("a", key)


async def test_a_job_that_every_router_dies_of_fails_and_says_so() -> None:
    logs, answers = MemoryLogs(), Answers()
    jobs = JobLog(logs, MODEL, Shares(1 << 40), lambda: 0.0)
    await jobs.submit(spec("k", b"1", 0.0), b"1")
    answers.crash = True
    async with memory_bus(MemoryBroker()) as bus, Progress(bus) as progress:
        worker = JobWorker(jobs, answers, progress)  # type: ignore[arg-type]
        for _ in range(MOST_DELIVERIES):
            with pytest.raises(Crash):
                await worker.work(_taken(logs))
        await worker.work(_taken(logs))
    last = await jobs.known("t", job_id("t", "k"))
    assert (last.status, last.status_code) == ("failed", 500)
    assert b"routers ended" in last.data
    assert not logs.queues[JOBS(model=MODEL).name]


def _taken(logs: MemoryLogs) -> Any:
    message = logs.take(JOBS(model=MODEL))
    assert message is not None
    assert isinstance(message.message, JobWork)
    return message
