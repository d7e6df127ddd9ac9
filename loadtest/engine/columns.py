"""What is measured of an engine, and how a figure comes from a timing. Pure."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from loadtest.peers.base import Timing, Weights


@dataclass(frozen=True, slots=True)
class Task:
    """`count` distinct prompts at once, each of `prompt_tokens`, continued by `new_tokens`."""

    name: str
    prompt_tokens: int
    new_tokens: int
    count: int = 1


@dataclass(frozen=True, slots=True)
class Column:
    """A figure that one task gives; larger is better."""

    name: str
    task: Task
    figure: Callable[[Task, Timing], float]
    decode: bool = False
    """Its steps each read all weights and the cache of the context: a share of the bandwidth can be given."""

    def context_tokens(self) -> float:
        """Tokens whose KV a step reads, in the mean."""
        return self.task.prompt_tokens + self.task.new_tokens / 2


def prefill_rate(task: Task, timing: Timing) -> float:
    """Prompt tokens a second until the first new token."""
    return task.prompt_tokens / timing.first_s


def decode_rate(task: Task, timing: Timing) -> float:
    """New tokens a second after the first."""
    return (timing.new_tokens - 1) / (timing.total_s - timing.first_s)


def total_rate(task: Task, timing: Timing) -> float:
    """Tokens in and out, of all prompts, a second."""
    return task.count * (task.prompt_tokens + timing.new_tokens) / timing.total_s


_SHORT, _MIDDLE, _LONG = Task("32", 32, 64), Task("512", 512, 64), Task("1536", 1536, 64)
_EIGHT = Task("8 x 512", 512, 64, count=8)

COLUMNS: tuple[Column, ...] = (
    Column("prefill@512", _MIDDLE, prefill_rate),
    Column("prefill@1536", _LONG, prefill_rate),
    Column("decode@32", _SHORT, decode_rate, decode=True),
    Column("decode@512", _MIDDLE, decode_rate, decode=True),
    Column("decode@1536", _LONG, decode_rate, decode=True),
    Column("8-at-once", _EIGHT, total_rate),
)


def chosen(names: Sequence[str]) -> tuple[Column, ...]:
    """Raises ValueError for a name that is none."""
    known = {column.name: column for column in COLUMNS}
    if unknown := sorted(set(names) - known.keys()):
        raise ValueError(f"no column {', '.join(unknown)}; known: {', '.join(known)}")
    return tuple(known[name] for name in names) or COLUMNS


def tasks(columns: Sequence[Column]) -> tuple[Task, ...]:
    """Those that the columns need, each once."""
    return tuple(dict.fromkeys(column.task for column in columns))


def bandwidth_share(column: Column, rate: float, weights: Weights, bytes_per_s: float) -> float:
    """What a decode rate reads at least, as a share of what memory can give."""
    step_bytes = weights.weight_bytes + column.context_tokens() * weights.kv_token_bytes
    return rate * step_bytes / bytes_per_s
