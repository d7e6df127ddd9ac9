"""Interleaved rounds: every engine in turn, alone on the machine, so that drift hits all alike."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field
from typing import Protocol

from loadtest.engine.columns import Column, Task, tasks
from loadtest.peers.base import Prompts, Timing, Unusable, Weights

Draw = Callable[[str, int], list[int]]
"""A prompt by label and length."""


class Running(Protocol):
    """An engine that is up."""

    weights: Weights

    @property
    def peak_bytes(self) -> int:
        """The most memory that it has had so far."""
        ...

    async def generate(self, prompts: Prompts, new_tokens: int) -> Timing: ...


class Subject(Protocol):
    """A row of the comparison."""

    @property
    def name(self) -> str: ...

    def running(self) -> AbstractAsyncContextManager[Running]:
        """Starts it, and ends it on leaving. Raises Unusable."""
        ...


@dataclass
class Row:
    """What the rounds found of one subject."""

    name: str
    figures: dict[str, list[float]] = field(default_factory=dict)
    """By column, one a round."""
    peak_bytes: int = 0
    weights: Weights | None = None
    unusable: str = ""
    """Why it is left out, if it is."""
    load_averages: list[float] = field(default_factory=list)
    """Of the machine when its turn began."""
    ids: dict[str, list[tuple[int, ...]]] = field(default_factory=dict)
    """By task, the first prompt's new tokens, one answer a round; empty where they aren't told."""


async def run_rounds(
    subjects: Sequence[Subject], columns: Sequence[Column], rounds: int, draw: Draw, tell: Callable[[str], None]
) -> list[Row]:
    """One row a subject, in their order. A subject that fails once is left out from there on, with the reason."""
    rows = {subject.name: Row(subject.name) for subject in subjects}
    for number in range(rounds):
        # Another one begins each time: whoever follows the heaviest one is not always the same.
        start = number % max(len(subjects), 1)
        for subject in (*subjects[start:], *subjects[:start]):
            row = rows[subject.name]
            if row.unusable:
                continue
            try:
                timings = await _turn(subject, row, tasks(columns), number, draw)
            except Unusable as error:
                row.unusable = str(error)
                tell(f"{subject.name}: left out: {error}")
                continue
            found = {column.name: column.figure(column.task, timings[column.task]) for column in columns}
            for name, figure in found.items():
                row.figures.setdefault(name, []).append(figure)
            for task, timing in timings.items():
                row.ids.setdefault(task.name, []).append(timing.ids)
            tell(f"round {number + 1}/{rounds} {subject.name}: {_line(found)}")
    return list(rows.values())


async def _turn(subject: Subject, row: Row, wanted: Sequence[Task], number: int, draw: Draw) -> Mapping[Task, Timing]:
    row.load_averages.append(round(os.getloadavg()[0], 2))
    async with subject.running() as running:
        warm = wanted[0]
        await running.generate([draw(f"warm-up/{number}", warm.prompt_tokens)], 8)
        timings = {}
        for task in wanted:
            prompts = [draw(f"{task.name}/{number}/{i}", task.prompt_tokens) for i in range(task.count)]
            timings[task] = await running.generate(prompts, task.new_tokens)
        row.peak_bytes = max(row.peak_bytes, running.peak_bytes)
        row.weights = running.weights
    return timings


def _line(found: Mapping[str, float]) -> str:
    return ", ".join(f"{name} {figure:.0f}" for name, figure in found.items())
