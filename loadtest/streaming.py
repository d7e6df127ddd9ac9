"""A worker whose memory is smaller than its model, beside one that has all of it in memory: rate, text and memory.

Each way runs in a process of its own, in turns, so that each has its own peak of resident memory:

    result = measure(default_checkpoint(), "int8", share=0.2)
"""

from __future__ import annotations

import asyncio
import json
import math
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from loadtest.memory import peak_bytes, resident_bytes
from loadtest.peers.checkpoint_source import CheckpointSource
from pdbus.caching.cache_folder import CacheFolder
from pdbus.engine.version import load
from pdbus.kv.format import PAGE_TOKENS
from pdbus.model.backend import Backend
from pdbus.model.backends import BackendOptions, EngineName, PrecisionChoice, open_backend
from pdbus.model.batch import Batch, SequenceSlice
from pdbus.model.checkpoint import open_checkpoint
from pdbus.model.config import ModelConfig, expected_tensors
from pdbus.model.families import writing

_FOLDER_BYTES = 64 << 30
_NEW_TOKENS = 24
_VOCABULARY = 30_000
"""Of random prompts; at most."""


@dataclass(frozen=True)
class Way:
    """What one process found."""

    budget_bytes: int | None
    """None: everything in memory."""
    weights_bytes: int
    """Of the model as it is computed with."""
    prefill_s: float
    """The median of some prompts."""
    decode_s: float
    """The median step of one token."""
    ids: tuple[int, ...]
    """Greedy, after the first prompt."""
    logits: str
    """A digest of the last prompt token's logits, bit for bit."""
    loaded_s: float
    before_bytes: int
    """Resident before the weights were loaded."""
    resident_bytes: int
    """Resident after the last step."""
    peak_bytes: int
    """The most that was resident ever since the load had ended, steps included."""


@dataclass(frozen=True)
class Streaming:
    resident: Way
    streamed: Way

    @property
    def rate(self) -> float:
        """Of the resident prefill rate."""
        return self.resident.prefill_s / self.streamed.prefill_s

    @property
    def weight_memory(self) -> float:
        """What the streamed weights take at most, as a share of all. What else grows is taken as the same in both."""
        whole = self.resident.weights_bytes
        others = self.resident.peak_bytes - self.resident.before_bytes - whole
        return (self.streamed.peak_bytes - self.streamed.before_bytes - others) / whole

    @property
    def equal(self) -> bool:
        return self.resident.ids == self.streamed.ids


def measure(
    checkpoint: Path,
    precision: PrecisionChoice = "int8",
    *,
    share: float = 0.2,
    engine: EngineName = "native",
    prompt_tokens: int = 512,
    rounds: int = 3,
    threads: int = 1,
) -> Streaming:
    """Both ways in turn. `share`: of the model's bytes, that the second may have in memory.

    Raises RuntimeError with what a process said where it failed."""
    with tempfile.TemporaryDirectory(prefix="pdbus-streaming-") as folder:
        common = {
            "checkpoint": str(checkpoint), "precision": precision, "engine": engine, "threads": threads,
            "tokens": prompt_tokens, "rounds": rounds, "folder": folder,
        }  # fmt: skip
        resident = _run(common | {"budget": None})
        return Streaming(resident, _run(common | {"budget": int(share * resident.weights_bytes)}))


def _run(task: dict[str, Any]) -> Way:
    command = [sys.executable, "-m", "loadtest.streaming", json.dumps(task)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(done.stderr.strip())
    told = json.loads(done.stdout)
    return Way(**told | {"ids": tuple(told["ids"])})


async def _way(task: dict[str, Any]) -> Way:
    checkpoint = open_checkpoint(task["checkpoint"])
    source = CheckpointSource(checkpoint)
    folder = CacheFolder(Path(task["folder"]), _FOLDER_BYTES)
    options = BackendOptions(
        task["engine"], task["precision"], threads=task["threads"], folder=folder, weight_bytes=task["budget"]
    )
    config = writing(checkpoint.config)
    with _backend(options, config) as backend:

        async def backend_for(_: ModelConfig) -> Backend:
            return backend

        before, started = resident_bytes(), time.perf_counter()
        version = await load(source.known.root, source, (), backend_for, lambda done, total: None)
        loaded_s = time.perf_counter() - started
        return _computed(backend, version.model, task, loaded_s, before)


def _computed(backend: Backend, model: Any, task: dict[str, Any], loaded_s: float, before: int) -> Way:
    _forget_peak()
    tokens, rounds = task["tokens"], task["rounds"]
    pages = math.ceil((tokens + _NEW_TOKENS) / PAGE_TOKENS)
    pool = backend.pool(backend.page_format(model.config), pages)
    prefills, steps, ids, logits = [], [], [], np.empty(0, np.float32)
    for number in range(rounds + 1):  # the first one warms up
        random = np.random.default_rng(0)
        prompt = random.integers(0, min(_VOCABULARY, model.config.vocab_size), tokens).tolist()
        started = time.perf_counter()
        row = model.forward(Batch(prompt, [SequenceSlice(0, tokens, 0, range(pages))], [tokens - 1]), pool)[0]
        prefills.append(time.perf_counter() - started)
        if number == rounds:
            logits = row
            for past in range(tokens, tokens + _NEW_TOKENS):
                ids.append(int(row.argmax()))
                started = time.perf_counter()
                row = model.forward(Batch(ids[-1:], [SequenceSlice(0, 1, past, range(pages))], [0]), pool)[0]
                steps.append(time.perf_counter() - started)
    return Way(
        budget_bytes=task["budget"],
        weights_bytes=_weight_bytes(model, task["engine"]),
        prefill_s=statistics.median(prefills[1:]),
        decode_s=statistics.median(steps),
        ids=tuple(ids),
        logits=logits.tobytes().hex()[:64],
        loaded_s=loaded_s,
        before_bytes=before,
        resident_bytes=resident_bytes(),
        peak_bytes=peak_bytes(),
    )


def _weight_bytes(model: Any, engine: str) -> int:
    if engine == "native":
        return int(model.nbytes)
    return 4 * sum(math.prod(shape) for shape in expected_tensors(model.config).values())


def _forget_peak() -> None:
    """The kernel's record of the most that was resident begins anew (proc(5), clear_refs)."""
    Path("/proc/self/clear_refs").write_text("5")


@contextmanager
def _backend(options: BackendOptions, config: ModelConfig) -> Iterator[Backend]:
    backend = open_backend(options, config)
    try:
        yield backend
    finally:
        backend.close()


if __name__ == "__main__":
    print(json.dumps(asdict(asyncio.run(_way(json.loads(sys.argv[1]))))))
