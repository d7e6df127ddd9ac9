"""The watermark model tells which version of every part an answer was computed with."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from loadtest.checker import watermark, watermark_files
from loadtest.checker.watermark import LAYERS, Marks
from pdbus.kv.pool import KvPool
from pdbus.model.backend import Backend, Model
from pdbus.model.backends import BackendOptions, open_backend
from pdbus.model.checkpoint import Checkpoint, open_checkpoint
from pdbus.native.build import levels
from tests.support.llama import Runner

PROMPT = [3, 77, 100, 45, 200, 9, 14, 61] * 5
TOKENS = 2 * LAYERS


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    return open_checkpoint(watermark_files.write(tmp_path_factory.mktemp("watermark"), Marks()))


@pytest.fixture(
    scope="module",
    params=["torch", pytest.param("native", marks=pytest.mark.skipif(not levels(), reason="no kernels"))],
)
def backend(request: pytest.FixtureRequest, checkpoint: Checkpoint) -> Iterator[Backend]:
    opened = open_backend(BackendOptions(request.param, "fp32", "fp32"), checkpoint.config)
    yield opened
    opened.close()


def made(backend: Backend, checkpoint: Checkpoint, marks: Marks) -> Model:
    weights = dict(checkpoint.tensors()) | watermark_files.tensors(marks, only=Marks())
    return backend.build(checkpoint.config, {}, weights, None)


def ask(backend: Backend, checkpoint: Checkpoint, marks: Marks, prompt: list[int] = PROMPT) -> list[int]:
    return Runner(made(backend, checkpoint, marks)).greedy(prompt, TOKENS)


@pytest.mark.parametrize("version", [1, 7, 165, 1000])
def test_a_pure_version_answers_as_computed_in_closed_form(
    backend: Backend, checkpoint: Checkpoint, version: int
) -> None:
    marks = Marks.pure(version)
    for prompt in (PROMPT, PROMPT[:1], [*PROMPT[:-1], PROMPT[-1] + 5]):
        assert ask(backend, checkpoint, marks, prompt) == watermark.answer(marks, prompt, TOKENS)


@pytest.mark.parametrize("marks", [Marks.pure(4).layers(5, 1), Marks.pure(4).layers(5, 0, 3), Marks.pure(4).top(5)])
def test_any_part_of_another_version_shows_and_is_named(backend: Backend, checkpoint: Checkpoint, marks: Marks) -> None:
    found = ask(backend, checkpoint, marks)
    assert found == watermark.answer(marks, PROMPT, TOKENS)
    assert found != watermark.answer(Marks.pure(4), PROMPT, TOKENS)
    assert "of 5" in watermark.explain(PROMPT, found, Marks.pure(4), range(8))
    assert watermark.explain(PROMPT, found, marks, range(8)) == ""


@pytest.mark.parametrize("layer", range(LAYERS))
@pytest.mark.parametrize("stale", [1, 16])
def test_kv_of_another_version_shows(backend: Backend, checkpoint: Checkpoint, layer: int, stale: int) -> None:
    """A page, or a single token, of one layer was written by the version before."""
    new, old = Runner(made(backend, checkpoint, Marks.pure(4))), Runner(made(backend, checkpoint, Marks.pure(3)))
    for runner in (new, old):
        runner.logits(PROMPT[:-1])
    for slot in range(stale):
        copy_token(old.pool, new.pool, layer, old.page_ids[0], slot)
    found = [int(new.logits(PROMPT[-1:], past=len(PROMPT) - 1)[-1].argmax())]
    while len(found) < TOKENS:
        found.append(int(new.logits(found[-1:], past=len(PROMPT) + len(found) - 1)[-1].argmax()))
    assert watermark.follows(PROMPT, found)
    wrong = {
        watermark.place(id)[1]
        for id, right in zip(found, watermark.answer(Marks.pure(4), PROMPT, TOKENS), strict=True)
        if id != right
    }
    assert wrong == {layer}
    assert f"layer {layer} tells" in watermark.explain(PROMPT, found, Marks.pure(4), range(8))


def copy_token(old: KvPool, new: KvPool, layer: int, page: int, slot: int) -> None:
    """Pages of fp32 hold K and V of their tokens one after another."""
    size = old.format.layer_bytes // old.format.page_tokens // 2
    theirs, ours = (bytearray(pool.read_bytes(slice(layer, layer + 1), [page])) for pool in (old, new))
    for half in range(2):
        at = half * old.format.layer_bytes // 2 + slot * size
        ours[at : at + size] = theirs[at : at + size]
    new.write_bytes(slice(layer, layer + 1), [page], bytes(ours))


def test_versions_that_are_near_each_other_differ_in_every_layer() -> None:
    for one, other in itertools.combinations(range(11), 2):
        for layer in range(LAYERS):
            assert Marks.pure(one).value(layer) != Marks.pure(other).value(layer)


def test_what_changes_is_what_the_parts_say() -> None:
    changed = watermark_files.tensors(Marks.pure(1).top(2), only=Marks.pure(1))
    assert set(changed) == {"lm_head.weight", f"model.layers.{LAYERS - 1}.mlp.down_proj.weight"}
    whole = watermark_files.tensors(Marks.pure(1))
    assert all(np.isfinite(array).all() for array in whole.values())


def test_an_answer_of_another_prompt_is_told_apart() -> None:
    other = [*PROMPT[:-1], PROMPT[-1] + 1]
    found = watermark.answer(Marks.pure(1), other, TOKENS)
    assert "another prompt" in watermark.explain(PROMPT, found, Marks.pure(1), [])


def test_the_folder_can_be_opened(tmp_path: Path) -> None:
    checkpoint = open_checkpoint(watermark_files.write(tmp_path, Marks.pure(1)))
    assert {name: array.tobytes() for name, array in checkpoint.tensors()} == {
        name: array.tobytes() for name, array in watermark_files.tensors(Marks.pure(1)).items()
    }
