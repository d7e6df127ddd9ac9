"""A step with rows of several versions gives each what it gets alone, and what they share is computed once."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from pdbus.canonical import content_digest
from pdbus.kv.format import PAGE_TOKENS
from pdbus.model.backend import Backend, Model
from pdbus.model.backends import BackendOptions, open_backend
from pdbus.model.batch import Batch, SequenceSlice
from pdbus.model.checkpoint import Checkpoint, open_checkpoint
from pdbus.model.runs import over
from pdbus.native.build import levels
from pdbus.weights.layer import layer_of
from tests.support.checkpoints import Family, tiny_checkpoint

Arrays = dict[str, np.ndarray]
needs_native = pytest.mark.skipif(not levels(), reason="no kernels for this processor")
ENGINES = {
    "torch": BackendOptions("torch", "fp32", "fp32"),
    "fp32": BackendOptions("native", "fp32", "fp32", threads=2),
    "int8": BackendOptions("native", "int8", "int8", threads=2),
    "int4": BackendOptions("native", "int4", "fp16", threads=2),
}
CHANGED = (
    (),
    ("model.layers.1.mlp.up_proj.weight",),
    ("model.layers.2.self_attn.k_proj.weight", "model.norm.weight"),
    ("model.embed_tokens.weight",),
)
"""Of four versions."""
TEXTS = ((40, 39), (70, 0), (300, 299), (17, 16), (33, 30), (20, 19), (5, 0), (64, 63))
"""(tokens, of which computed before): answers, a whole prompt, a later chunk. Two of each version, in turn."""
PAGES = 32


@pytest.fixture(params=["torch", *(pytest.param(name, marks=needs_native) for name in ("fp32", "int8", "int4"))])
def engine(request: pytest.FixtureRequest) -> str:
    torch.set_num_threads(1)
    return request.param  # type: ignore[no-any-return]


@pytest.fixture(scope="module", params=["llama", "mistral", "qwen3"], ids=["tied", "untied", "qk-norm"])
def checkpoint(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    family: Family = request.param
    return open_checkpoint(str(tiny_checkpoint(tmp_path_factory.mktemp("one"), family, num_hidden_layers=4)))


def build(backend: Backend, checkpoint: Checkpoint) -> list[Model]:
    tensors, made = dict(checkpoint.tensors()), []
    for names in CHANGED:
        own = tensors | {name: tensors[name] * np.float32(1.25) for name in names}
        digests: dict[str, bytes] = {}
        for name, array in own.items():
            digests[layer_of(name)] = content_digest(digests.get(layer_of(name), b"") + array.tobytes())
        made.append(backend.build(checkpoint.config, digests, own, made[0] if made else None))
    return made


def pages(text: int) -> list[int]:
    """Far apart, and not in order."""
    return list(range((text + 1) * PAGES - 1, text * PAGES - 1, -1))


def tokens(text: int) -> list[int]:
    return np.random.default_rng(text).integers(3, 320, TEXTS[text][0]).tolist()


def version_of(text: int) -> int:
    return text // 2 % len(CHANGED)


def step(pool: Any, models: list[Model], texts: list[int], start: int | None = None) -> list[np.ndarray]:
    """Computes the rest of these texts in one step; `start`: from there on. The logits of each one's last token."""
    parts = []
    for version in range(len(models)):
        batch: list[int] = []
        slices = []
        for text in (one for one in texts if version_of(one) == version):
            past = TEXTS[text][1] if start is None else start
            until = TEXTS[text][0] if start is None else TEXTS[text][1]
            slices.append(SequenceSlice(len(batch), until - past, past, pages(text)))
            batch += tokens(text)[past:until]
        if batch:
            last = [piece.start + piece.length - 1 for piece in slices]
            # Of the second version only one row is wanted: runs are shorter in the last layer.
            parts.append((models[version], Batch(batch, slices, last[:1] if version == 1 and start is None else last)))
    (model, first), *beside = parts
    return list(model.forward(first, pool, beside=beside))


def test_each_version_gets_what_it_gets_alone(engine: str, checkpoint: Checkpoint) -> None:
    backend = open_backend(ENGINES[engine], checkpoint.config)
    models = build(backend, checkpoint)
    assert len({model.kind for model in models}) == 1
    page_format = backend.page_format(checkpoint.config)
    together, alone = (backend.pool(page_format, len(TEXTS) * PAGES) for _ in range(2))
    begun = [text for text, (_, past) in enumerate(TEXTS) if past]
    for pool in (together, alone):
        for text in begun:
            step(pool, models, [text], start=0)
    found = step(together, models, list(range(len(TEXTS))))
    wanted = [row for version in range(len(models)) for row in step(alone, models, [2 * version, 2 * version + 1])]
    assert len(found) == len(wanted) == len(TEXTS) - 1
    used = [page for text, (length, _) in enumerate(TEXTS) for page in pages(text)[: length // PAGE_TOKENS]]
    if engine == "torch":
        np.testing.assert_allclose(found, wanted, atol=2e-4)
    else:
        assert np.array_equal(found, wanted)
        assert together.read_bytes(slice(None), used) == alone.read_bytes(slice(None), used)
    backend.close()


def test_neighbours_with_the_same_weights_are_one_piece_of_work() -> None:
    shared, other = object(), object()
    x, seen = torch.arange(9), []

    def work(own: object, rows: slice) -> torch.Tensor:
        seen.append((own, rows))
        return x[rows]

    assert torch.equal(over([2, 3, 0, 4], [shared, shared, shared, other], work), x)
    assert seen == [(shared, slice(0, 5)), (other, slice(5, 9))]


@pytest.mark.parametrize("engine", ["torch", pytest.param("int8", marks=needs_native)], indirect=True)
def test_versions_of_another_shape_are_of_another_kind(engine: str, tmp_path: Path) -> None:
    one, two = (
        open_checkpoint(str(tiny_checkpoint(tmp_path / str(layers), "llama", num_hidden_layers=layers)))
        for layers in (2, 3)
    )
    backend = open_backend(ENGINES[engine], one.config)
    kinds = {backend.build(each.config, {}, dict(each.tensors()), None).kind for each in (one, one, two)}
    assert len(kinds) == 2
    backend.close()
