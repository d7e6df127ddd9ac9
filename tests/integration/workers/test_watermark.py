"""Real workers on the watermark model: every answer is its version's, by hand-over, from pages, and locally. And where
pages are keyed without their version, which is what others do, the answer tells."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from loadtest.checker import watermark, watermark_files
from loadtest.checker.watermark import LAYERS, Marks
from pdbus.engine import version as subject
from pdbus.model.backends import EngineName
from pdbus.model.checkpoint import open_checkpoint
from tests.integration.workers.conftest import needs_native
from tests.support.asking import ids
from tests.support.workers import LocalSource, NewBus, rig

MARKS = {"a": Marks.pure(1), "b": Marks.pure(2), "top": Marks.pure(1).top(3)}
PROMPT = [*range(3, 43), 77]
TOKENS = 2 * LAYERS


@pytest.fixture(scope="module")
def versions(tmp_path_factory: pytest.TempPathFactory) -> LocalSource:
    folder = tmp_path_factory.mktemp("watermark")
    return LocalSource({name: open_checkpoint(watermark_files.write(folder / name, it)) for name, it in MARKS.items()})


async def answers(versions: LocalSource, new_bus: NewBus, engine: EngineName) -> dict[str, list[list[int]]]:
    """Of each version, one after another on the same workers: handed over, again, and read by decode itself."""
    found: dict[str, list[list[int]]] = {}
    async with rig(new_bus, versions, name="watermark", engine=engine) as workers:
        for name in MARKS:
            root = versions.root_of[name]
            asked = [workers.router.ticket(PROMPT, TOKENS, root=root) for _ in range(3)]
            ways = (workers.router.answer, workers.router.answer, workers.router.answer_local)
            found[name] = [ids(await way(ticket)) for way, ticket in zip(ways, asked, strict=True)]
    return found


@pytest.mark.parametrize("engine", ["torch", pytest.param("native", marks=needs_native)])
async def test_no_answer_has_a_part_of_another_version(versions: LocalSource, twin: NewBus, engine: EngineName) -> None:
    for name, found in (await answers(versions, twin, engine)).items():
        assert found == [watermark.answer(MARKS[name], PROMPT, TOKENS)] * 3, name


async def test_pages_without_their_version_in_their_key_would_show(
    versions: LocalSource, twin: NewBus, monkeypatch: pytest.MonkeyPatch
) -> None:
    scope_of = subject.prefix_scope
    monkeypatch.setattr(subject, "prefix_scope", lambda *given: without_version(scope_of(*given)))
    found = await answers(versions, twin, "torch")
    assert found["a"] == [watermark.answer(MARKS["a"], PROMPT, TOKENS)] * 3
    for stale in found["b"]:
        assert watermark.follows(PROMPT, stale)
        assert "stale KV" in watermark.explain(PROMPT, stale, MARKS["b"], range(4))


def without_version(scope: Any) -> Any:
    return replace(scope, kv_root=bytes(32))
