"""Cached prompts across updates: valid where nothing changed that KV depends on, never where something did."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from pdbus.bus.bus import memory_bus
from pdbus.bus.memory import MemoryBroker
from pdbus.context import Deadline
from pdbus.engine.rates import Rates
from pdbus.kv.prefix import page_keys
from pdbus.model.backend import Backend
from pdbus.model.backends import BackendOptions, EngineName, open_backend
from pdbus.model.checkpoint import Checkpoint
from tests.integration.workers.test_tiers import forget, node
from tests.support.asking import ids, until
from tests.support.llama import Runner
from tests.support.workers import LocalSource, Rig, paused, rig

PROMPT = random.Random(5).choices(range(3, 320), k=70)
PAGES = 4
LAST = "model.layers.1."
UPDATES: dict[str, tuple[str, ...]] = {
    "base": (),
    # Nothing of it is read before the last K and V.
    "above": (
        *(f"{LAST}self_attn.{name}_proj.weight" for name in "qo"),
        *(f"{LAST}mlp.{name}_proj.weight" for name in ("gate", "up", "down")),
        f"{LAST}post_attention_layernorm.weight",
        "model.norm.weight",
    ),
    "keys": (f"{LAST}self_attn.k_proj.weight",),
}


def updated(checkpoint: Checkpoint, names: tuple[str, ...]) -> Any:
    """A version in which these tensors are others: stands for its Checkpoint, as far as it is read."""

    def tensors() -> Iterator[tuple[str, np.ndarray]]:
        for name, array in checkpoint.tensors():
            factors = np.linspace(1.2, 1.6, len(array), dtype=np.float32).reshape(-1, *[1] * (array.ndim - 1))
            yield name, array * factors if name in names else array

    return SimpleNamespace(config=checkpoint.config, meta=checkpoint.meta, tensors=tensors)


@pytest.fixture(scope="module")
def versions(checkpoints: Mapping[str, Checkpoint]) -> dict[str, Any]:
    return {name: updated(checkpoints["a"], changed) for name, changed in UPDATES.items()}


@pytest.fixture
def backend(checkpoints: Mapping[str, Checkpoint], engine: EngineName) -> Iterator[Backend]:
    made = open_backend(BackendOptions(engine, "fp32", "fp32"), checkpoints["a"].config)
    yield made
    made.close()


def cold_answers(backend: Backend, versions: Mapping[str, Any]) -> dict[str, list[int]]:
    """Of a process that has seen nothing else."""
    built = {name: backend.build(one.config, {}, dict(one.tensors()), None) for name, one in versions.items()}
    answers = {name: Runner(model).greedy(PROMPT, 12) for name, model in built.items()}  # type: ignore[arg-type]
    assert len({tuple(answer) for answer in answers.values()}) == len(answers), "an update that shows in no answer"
    return answers


async def test_a_prompt_is_cached_across_an_update_where_its_kv_is_the_same_and_only_there(
    versions: dict[str, Any], backend: Backend, unique: Callable[[str], str], tmp_path: Path, engine: EngineName
) -> None:
    cold, broker, source = cold_answers(backend, versions), MemoryBroker(), LocalSource(versions)
    async with rig(lambda: memory_bus(broker), source, name=unique("tiny"), version="base", engine=engine) as workers:

        async def ask(version: str) -> int:
            """Pages that were cached; the text is that of a cold run."""
            worker = workers.prefill
            worker.l2.rates = Rates(worker.pool.format.page_bytes, 16)  # a tiny model is faster than any tier
            items = await workers.router.answer(workers.router.ticket(PROMPT, 12, root=source.root_of[version]))
            assert ids(items) == cold[version]
            return (items[0].cached_tokens or 0) // 16

        keys = {name: _keys(workers, source.root_of[name]) for name in UPDATES}
        assert keys["base"] == keys["above"] != keys["keys"]
        async with node(broker, workers, tmp_path) as first:
            # Before, after, after a rollback: in the worker's own pages.
            assert [await ask(one) for one in ("base", "above", "base", "keys")] == [0, PAGES, PAGES, 0]
            assert [await ask(one) for one in ("base", "keys", "above")] == [PAGES] * 3
            # In the memory of a cache node, stored under another root than the one that asks.
            await until(lambda: all(key.digest in first.store for key in (*keys["base"], *keys["keys"])))
            for reader in ("above", "base", "keys"):
                await forget(workers, keys[reader])
                assert await ask(reader) == PAGES
            assert first.disk
            await first.disk.drain(Deadline.after(30))
        for reader in ("above", "keys"):
            await forget(workers, keys[reader])
        async with node(broker, workers, tmp_path):  # on its disk
            assert [await ask(one) for one in ("above", "keys")] == [PAGES] * 2
        # Nothing of what is dropped for one of the roots is found by the other any more, and the text stays the same.
        await workers.prefill.core.call(lambda: workers.prefill.core.drop_root(keys["base"][0].kv_root))
        assert [await ask(one) for one in ("keys", "above", "base")] == [PAGES, 0, PAGES]
        await workers.until_idle()


async def test_answers_on_several_versions_share_steps_and_each_is_its_own(
    versions: dict[str, Any], backend: Backend, unique: Callable[[str], str], engine: EngineName
) -> None:
    cold, broker, source = cold_answers(backend, versions), MemoryBroker(), LocalSource(versions)
    async with rig(lambda: memory_bus(broker), source, name=unique("tiny"), version="base", engine=engine) as workers:
        scheduler, router = workers.decode.core._scheduler, workers.router
        take_turn, mixed = scheduler.turn, []

        def turn(now_s: float) -> Any:
            taken = take_turn(now_s)
            mixed.extend(len({chunk.sequence.ticket.root for chunk in group}) for group in taken.groups)
            return taken

        scheduler.turn = turn  # type: ignore[method-assign]
        with paused(workers.decode):  # all come to the same first turn
            names = [*UPDATES, *UPDATES]
            tickets = [router.ticket(PROMPT, 12, root=source.root_of[name]) for name in names]
            answers = [asyncio.create_task(router.answer_local(ticket)) for ticket in tickets]
            await until(lambda: workers.decode.core.live == len(tickets))
        for name, items in zip(names, await asyncio.gather(*answers), strict=True):
            assert ids(items) == cold[name]
        assert max(mixed) == len(UPDATES)
        await workers.until_idle()


def _keys(workers: Rig, root: bytes) -> Any:
    version = workers.prefill.versions.get(root)
    assert version
    return page_keys(PROMPT, version.scope)
