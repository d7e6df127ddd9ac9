"""After an update of upper layers a cached prompt is computed again from there only, with the same bits and text."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from pdbus.bus.bus import memory_bus
from pdbus.bus.memory import MemoryBroker
from pdbus.kv.format import KvDtype
from pdbus.kv.prefix import page_keys
from pdbus.model.backend import Backend
from pdbus.model.backends import BackendOptions, EngineName, Precision, open_backend
from pdbus.model.batch import Batch, SequenceSlice
from pdbus.model.checkpoint import open_checkpoint
from tests.integration.workers.conftest import needs_native
from tests.integration.workers.test_prefix_after_updates import updated
from tests.integration.workers.test_tiers import pages_of
from tests.support.asking import ids
from tests.support.checkpoints import tiny_checkpoint
from tests.support.workers import LocalSource, Rig, prompt_of, rig

PROMPT = prompt_of(100, seed=8)
OTHER = prompt_of(100, seed=9)
PAGES = 6
"""Full ones of either."""
UPDATES: dict[str, tuple[str, ...]] = {
    "base": (),
    "top": tuple(f"model.layers.2.self_attn.{name}_proj.weight" for name in "qkvo"),
    "middle": ("model.layers.1.mlp.down_proj.weight",),
    "both": ("model.layers.1.input_layernorm.weight", "model.layers.2.self_attn.k_proj.weight"),
    "bottom": ("model.layers.0.self_attn.q_proj.weight",),
}
SAVED = {"top": 2, "middle": 1, "both": 1, "bottom": 0}
"""Layers of which nothing is computed again."""


def watched(workers: Rig) -> list[tuple[int, int]]:
    """What either worker copies from now on: (layers, pages)."""
    copied: list[tuple[int, int]] = []
    for worker in (workers.prefill, workers.decode):
        scheduler = worker.core._scheduler

        def spy(layer: int, sources: Any, targets: Any, copy: Any = scheduler._copy_below) -> None:
            copied.append((layer, len(targets)))
            assert not set(sources) & set(targets)
            copy(layer, sources, targets)

        scheduler._copy_below = spy
    return copied


def cold(backend: Backend, checkpoint: Any, prompt: list[int], answer_tokens: int) -> tuple[list[int], list[bytes]]:
    """The answer of a process that has seen nothing else, and the prompt's full pages."""
    model = backend.build(checkpoint.config, {}, dict(checkpoint.tensors()), None)
    pool = backend.pool(backend.page_format(checkpoint.config), 10)
    tokens, past, answer = list(prompt), 0, []
    for _ in range(answer_tokens):
        new = tokens[past:]
        (row,) = model.forward(Batch(new, [SequenceSlice(0, len(new), past, range(10))], [len(new) - 1]), pool)
        past = len(tokens)
        answer.append(int(row.argmax()))
        tokens.append(answer[-1])
    return answer, [bytes(pool.read_bytes(slice(None), [page])) for page in range(PAGES)]


@pytest.mark.parametrize(
    ("engine", "precision", "kv_dtype"),
    [
        ("torch", "fp32", "fp32"),
        pytest.param("native", "fp32", "fp16", marks=needs_native),
        pytest.param("native", "int8", "int8", marks=needs_native),
    ],
    ids=["torch", "native-fp32", "native-int8"],
)
async def test_lower_layers_are_not_computed_again(
    tmp_path: Path, unique: Callable[[str], str], engine: EngineName, precision: Precision, kv_dtype: KvDtype
) -> None:
    checkpoint = open_checkpoint(tiny_checkpoint(tmp_path, "llama", num_hidden_layers=3))
    versions = {name: updated(checkpoint, changed) for name, changed in UPDATES.items()}
    source, broker = LocalSource(versions), MemoryBroker()
    backend = open_backend(BackendOptions(engine, precision, kv_dtype), checkpoint.config)
    options: dict[str, Any] = {"engine": engine, "precision": precision, "kv_dtype": kv_dtype, "layer_groups": 3}
    async with rig(lambda: memory_bus(broker), source, name=unique("tiny"), version="base", **options) as workers:
        prefill, copied = workers.prefill, watched(workers)

        async def ask(name: str) -> tuple[int, list[tuple[int, int]]]:
            """(cached tokens, what was copied), with text and pages as of a cold run."""
            copied.clear()
            items = await workers.router.answer(workers.router.ticket(PROMPT, 8, root=source.root_of[name]))
            answer, pages = cold(backend, versions[name], PROMPT, 8)
            assert ids(items) == answer
            version = prefill.versions.get(source.root_of[name])
            found = await pages_of(workers, page_keys(PROMPT, version.scope))
            assert len(found) == PAGES
            if engine == "native":
                assert found == pages
            return items[0].cached_tokens, list(copied)

        async def ask_local(name: str) -> tuple[int, list[tuple[int, int]]]:
            """The same of a worker that reads prompts and answers them."""
            copied.clear()
            items = await workers.router.answer_local(workers.router.ticket(OTHER, 40, root=source.root_of[name]))
            assert ids(items) == cold(backend, versions[name], OTHER, 40)[0]
            return items[0].cached_tokens, list(copied)

        assert await ask("base") == (0, [])
        for name, layers in SAVED.items():
            assert await ask(name) == (0, [(layers, PAGES)] if layers else []), name
        # Each is now whole in the worker's pages; what a page was copied from plays no part any more.
        await prefill.core.call(
            lambda: prefill.core.drop_root(prefill.versions.get(source.root_of["base"]).scope.kv_root)
        )
        assert [await ask(name) for name in ("top", "both", "base")] == [(96, []), (96, []), (0, [(2, PAGES)])]
        assert [await ask_local(name) for name in ("base", "top", "top")] == [(0, []), (0, [(2, 6)]), (96, [])]
        await workers.until_idle()
    backend.close()
