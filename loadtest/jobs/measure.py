"""Jobs a second, and how soon each is accepted and answered, of a stack that runs."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from loadtest.cpu import per_request, used_ms
from pdbus.client import Client
from pdbus.errors import PdbusError


@dataclass(frozen=True)
class JobFigures:
    jobs: int
    at_once: int
    failed: int
    seconds: float
    """From the first submission to the last result."""
    accepted_ms: tuple[float, float]
    """p50 and p99 of a submission: then the job can't be lost."""
    result_ms: tuple[float, float]
    """p50 and p99 from submission to the result in the caller's hands."""
    cpu_ms: dict[str, float]
    """Of a core, for each job, by kind of process."""

    @property
    def per_s(self) -> float:
        return (self.jobs - self.failed) / self.seconds

    def lines(self) -> list[str]:
        return [
            f"{self.jobs} jobs, {self.at_once} callers: {self.per_s:.0f} jobs/s, {self.failed} failed",
            f"accepted within {self.accepted_ms[0]:.1f} ms (p99 {self.accepted_ms[1]:.1f} ms)",
            f"answered within {self.result_ms[0]:.1f} ms (p99 {self.result_ms[1]:.1f} ms)",
            "ms of a core for each job: " + ", ".join(f"{kind} {ms:.2f}" for kind, ms in self.cpu_ms.items()),
        ]


async def measure_jobs(client: Client, jobs: int, at_once: int, tokens: int, pids: Mapping[str, int]) -> JobFigures:
    """So many callers each submit a job, wait for its result, and submit the next. Every job has another prompt.

    `pids`: of the processes whose time on the cores counts, by name."""
    accepted: list[float] = []
    answered: list[float] = []
    numbers = iter(range(jobs))
    failed = 0

    async def caller() -> None:
        nonlocal failed
        for number in numbers:
            begun = time.perf_counter()
            try:
                body = {"prompt": f"job {number}", "max_tokens": tokens, "ignore_eos": True, "temperature": 1}
                told = await client.jobs.submit("completions", body)
                accepted.append(time.perf_counter() - begun)
                await client.jobs.result(told.id)
                answered.append(time.perf_counter() - begun)
            except PdbusError:
                failed += 1

    begun, before = time.perf_counter(), used_ms(pids)
    async with asyncio.TaskGroup() as group:
        for _ in range(at_once):
            group.create_task(caller())
    seconds = time.perf_counter() - begun
    cpu_ms = per_request(before, used_ms(pids), jobs)
    return JobFigures(jobs, at_once, failed, seconds, _quantiles_ms(accepted), _quantiles_ms(answered), cpu_ms)


def _quantiles_ms(seconds: Sequence[float]) -> tuple[float, float]:
    """p50 and p99, nearest rank; NaN without any."""
    if not seconds:
        return float("nan"), float("nan")
    ordered = sorted(seconds)
    return ordered[len(ordered) // 2] * 1e3, ordered[min(int(len(ordered) * 0.99), len(ordered) - 1)] * 1e3
