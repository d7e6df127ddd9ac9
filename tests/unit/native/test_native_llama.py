"""The native engine computes what the torch path computes, and the same bits however the work is cut (DESIGN.md G9)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from pdbus.kv.format import KvDtype
from pdbus.messages.common import Digest
from pdbus.model.batch import Batch, SequenceSlice
from pdbus.model.checkpoint import Checkpoint, open_checkpoint
from pdbus.model.native_build import build_native
from pdbus.model.native_llama import NativeLlama, Precision
from pdbus.model.native_pool import NativePool
from pdbus.native.build import levels
from pdbus.native.library import NativeEngine
from tests.support.checkpoints import FAMILIES, tiny_checkpoint
from tests.support.llama import Runner, load

Array = np.ndarray[Any, Any]
PRECISIONS: tuple[Precision, ...] = ("fp32", "int8-rows", "int8-groups", "int4-groups")
KV_DTYPES: tuple[KvDtype, ...] = ("fp32", "fp16", "int8")


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Checkpoint]:
    torch.set_num_threads(1)
    folder = tmp_path_factory.mktemp("models")
    return {family: open_checkpoint(str(tiny_checkpoint(folder, family))) for family in FAMILIES}


def built(checkpoint: Checkpoint, engine: NativeEngine, precision: Precision) -> NativeLlama:
    return build_native(checkpoint.config, {}, dict(checkpoint.tensors()), engine, precision)


def prompt(length: int, seed: int = 1) -> list[int]:
    return [int(token) for token in np.random.default_rng(seed).integers(3, 320, length)]


class Native:
    """One sequence alone, in pages that are not in order."""

    def __init__(self, model: NativeLlama, kv: KvDtype = "fp32", pages: int = 40) -> None:
        self.model, self.pool = model, NativePool(model.page_format(kv), pages)
        for layer in range(model.config.layers):
            self.pool.layer(layer)[:] = 0xFF  # NaN in fp32 and fp16: nothing may come of unwritten slots
        self.page_ids = list(reversed(range(pages)))

    def logits(self, tokens: list[int], chunk: int = 10_000) -> Array:
        parts = []
        for start in range(0, len(tokens), chunk):
            part = tokens[start : start + chunk]
            piece = SequenceSlice(0, len(part), start, self.page_ids)
            parts.append(self.model.forward(Batch(part, [piece], range(len(part))), self.pool))
        return np.concatenate(parts)


@pytest.mark.parametrize("family", FAMILIES)
def test_fp32_equals_the_torch_path(engine: NativeEngine, checkpoints: dict[str, Checkpoint], family: str) -> None:
    tokens = prompt(300)
    wanted = Runner(load(checkpoints[family])).logits(tokens).numpy()
    assert np.abs(Native(built(checkpoints[family], engine, "fp32")).logits(tokens) - wanted).max() < 1e-4


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("precision", ["int8-rows", "int8-groups"])
def test_int8_stays_near_fp32(
    engine: NativeEngine, checkpoints: dict[str, Checkpoint], family: str, precision: Precision
) -> None:
    tokens = prompt(100)
    wanted = Runner(load(checkpoints[family])).logits(tokens).numpy()
    found = Native(built(checkpoints[family], engine, precision)).logits(tokens)
    assert np.abs(found - wanted).mean() < 0.1 * wanted.std()


@pytest.mark.parametrize("family", ["llama", "mistral"])
@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("kv", KV_DTYPES)
def test_chunks_change_no_bit(
    engine: NativeEngine, checkpoints: dict[str, Checkpoint], family: str, precision: Precision, kv: KvDtype
) -> None:
    """Across 300 tokens, so that the blocks of attention (256 keys) are crossed."""
    model, tokens = built(checkpoints[family], engine, precision), prompt(300)
    whole = Native(model, kv).logits(tokens)
    for chunk in (1, 7, 16, 128):
        assert np.array_equal(Native(model, kv).logits(tokens, chunk), whole)


@pytest.mark.parametrize("kv", KV_DTYPES)
def test_wide_heads_change_no_bit(library_folder: Path, tmp_path: Path, kv: KvDtype) -> None:
    """Heads of 96, so that whole vectors and a rest are there; three blocks of keys; tiles of many rows and of few."""
    checkpoint, tokens = open_checkpoint(str(tiny_checkpoint(tmp_path, "llama", head_dim=96))), prompt(600)
    results = set()
    for level in levels():
        with NativeEngine(2, level, library_folder) as one:
            model = built(checkpoint, one, "int8-groups")
            results |= {Native(model, kv).logits(tokens, chunk).tobytes() for chunk in (1, 16, 512, 600)}
    assert len(results) == 1


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("kv", ["fp16", "int8"])
def test_narrow_pages_stay_near_fp32(
    engine: NativeEngine, checkpoints: dict[str, Checkpoint], family: str, kv: KvDtype
) -> None:
    tokens, model = prompt(300), built(checkpoints[family], engine, "fp32")
    wanted = Native(model).logits(tokens)
    found = Native(model, kv).logits(tokens)
    assert np.abs(found - wanted).mean() < {"fp16": 2e-3, "int8": 3e-2}[kv] * wanted.std()


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("kv", KV_DTYPES)
def test_neighbours_change_no_bit(
    engine: NativeEngine, checkpoints: dict[str, Checkpoint], precision: Precision, kv: KvDtype
) -> None:
    model = built(checkpoints["qwen2"], engine, precision)
    pool = NativePool(model.page_format(kv), 100)
    texts = [prompt(length, seed) for seed, length in enumerate((40, 300, 17, 64, 290, 5))]
    past = [39, 270, 0, 63, 289, 4]  # decoding, later chunks, a first chunk
    pages = [list(range(start, start + 20)) for start in (3, 23, 43, 60, 70, 0)]
    pages[3], pages[5] = pages[3][:5], pages[5][:1]
    for text, before, page_ids in zip(texts, past, pages, strict=True):
        if before:
            model.forward(Batch(text[:before], [SequenceSlice(0, before, 0, page_ids)], []), pool)
    tokens: list[int] = []
    slices = []
    for text, before, page_ids in zip(texts, past, pages, strict=True):
        slices.append(SequenceSlice(len(tokens), len(text) - before, before, page_ids))
        tokens += text[before:]
    last_rows = [piece.start + piece.length - 1 for piece in slices]
    together = model.forward(Batch(tokens, slices, last_rows), pool)
    alone = np.stack([Native(model, kv).logits(text)[-1] for text in texts])
    assert np.array_equal(together, alone)


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("kv", KV_DTYPES)
def test_threads_and_instruction_sets_change_no_bit(
    library_folder: Path, checkpoints: dict[str, Checkpoint], precision: Precision, kv: KvDtype
) -> None:
    results = []
    for level in levels():
        for threads in (1, 3):
            with NativeEngine(threads, level, library_folder) as one:
                results.append(Native(built(checkpoints["qwen3"], one, precision), kv).logits(prompt(280)).tobytes())
    assert len(set(results)) == 1


@pytest.mark.parametrize("kv", KV_DTYPES)
def test_attention_reads_what_the_pages_hold(
    engine: NativeEngine, checkpoints: dict[str, Checkpoint], kv: KvDtype
) -> None:
    """Pages read back and attended to by torch give what the kernels gave for the last token's step."""
    model = built(checkpoints["llama"], engine, "fp32")
    tokens, run = prompt(60), Native(model, kv)
    run.logits(tokens)
    runner = Runner(load(checkpoints["llama"]), pages=40)
    runner.logits(tokens)
    tolerance = {"fp32": 1e-5, "fp16": 2e-3, "int8": 3e-2}[kv]
    for layer in range(model.config.layers):
        for ours, theirs in zip(
            run.pool.gather(layer, run.page_ids[:4], 60),
            runner.pool.gather(layer, runner.pool.page_index(runner.page_ids[:4]), 60),
            strict=True,
        ):
            assert np.abs(ours - theirs.numpy()).max() < tolerance * (1 + layer) * np.abs(ours).max()


def test_each_layer_is_told_when_its_kv_is_final(engine: NativeEngine, checkpoints: dict[str, Checkpoint]) -> None:
    model = built(checkpoints["llama"], engine, "int4-groups")
    pool, told = NativePool(model.page_format("fp16"), 4), []
    seen: list[bytes] = []

    def on_layer(layer: int) -> None:
        told.append(layer)
        seen.append(pool.layer(layer)[:3].tobytes())

    model.forward(Batch(prompt(40), [SequenceSlice(0, 40, 0, [0, 1, 2])], []), pool, on_layer)
    assert told == [0, 1]
    assert seen == [pool.layer(layer)[:3].tobytes() for layer in range(2)]


def test_what_on_layer_raises_ends_the_step_and_is_raised_by_it(
    engine: NativeEngine, checkpoints: dict[str, Checkpoint]
) -> None:
    model = built(checkpoints["llama"], engine, "int4-groups")

    told: list[int] = []

    def on_layer(layer: int) -> None:
        told.append(layer)
        raise LookupError(layer)

    batch = Batch(prompt(5), [SequenceSlice(0, 5, 0, [0])], [])
    pool = NativePool(model.page_format("fp16"), 1)
    pool.layer(1)[:] = 0x11
    with pytest.raises(LookupError):
        model.forward(batch, pool, on_layer)
    assert told == [0]
    assert (pool.layer(1) == 0x11).all()  # the step was left there


def test_only_its_own_slots_are_written(engine: NativeEngine, checkpoints: dict[str, Checkpoint]) -> None:
    for kv in KV_DTYPES:
        model = built(checkpoints["llama"], engine, "fp32")
        pool = NativePool(model.page_format(kv), 6)
        for layer in range(2):
            pool.layer(layer)[:] = 0x11
        model.forward(Batch(prompt(20), [SequenceSlice(0, 20, 0, [4, 1])], []), pool)
        for layer in range(2):
            assert (pool.layer(layer)[[0, 2, 3, 5]] == 0x11).all()
        before = [np.stack(pool.gather(layer, [4, 1], 32))[:, 20:] for layer in range(2)]
        untouched = NativePool(model.page_format(kv), 1)
        untouched.layer(0)[:] = 0x11
        filler = np.stack(untouched.gather(0, [0], 12))
        assert all(np.array_equal(part, filler) for part in before)


def test_greedy_is_the_first_best_of_each_row(engine: NativeEngine, checkpoints: dict[str, Checkpoint]) -> None:
    model = built(checkpoints["llama"], engine, "int8-groups")
    greedy = np.empty(30, np.int32)
    batch = Batch(prompt(30), [SequenceSlice(0, 30, 0, [0, 1])], range(30))
    logits = model.forward(batch, NativePool(model.page_format(), 2), greedy=greedy)
    assert np.array_equal(greedy, logits.argmax(1))


def test_too_few_pages_are_refused(engine: NativeEngine, checkpoints: dict[str, Checkpoint]) -> None:
    model = built(checkpoints["llama"], engine, "fp32")
    with pytest.raises(ValueError, match="need 2 pages"):
        model.forward(Batch(prompt(20), [SequenceSlice(0, 20, 0, [0])], []), NativePool(model.page_format(), 1))


@pytest.mark.parametrize("token", [-1, 10**6])
def test_a_token_outside_the_vocabulary_is_refused(
    engine: NativeEngine, checkpoints: dict[str, Checkpoint], token: int
) -> None:
    model = built(checkpoints["llama"], engine, "fp32")
    with pytest.raises(ValueError, match="vocabulary"):
        model.forward(Batch([1, token], [SequenceSlice(0, 2, 0, [0])], [1]), NativePool(model.page_format(), 1))


@pytest.mark.parametrize("page", [-1, 1])
def test_a_page_outside_the_pool_is_refused(
    engine: NativeEngine, checkpoints: dict[str, Checkpoint], page: int
) -> None:
    model = built(checkpoints["llama"], engine, "fp32")
    with pytest.raises(ValueError, match="pool"):
        model.forward(Batch([1, 2], [SequenceSlice(0, 2, 0, [page])], [1]), NativePool(model.page_format(), 1))


@pytest.mark.parametrize("precision", PRECISIONS)
def test_a_version_shares_what_did_not_change(
    engine: NativeEngine, checkpoints: dict[str, Checkpoint], precision: Precision
) -> None:
    config, tensors = checkpoints["llama"].config, dict(checkpoints["llama"].tensors())
    digests = {name: Digest(bytes(32)) for name in ("embed", "layers.0", "layers.1", "head")}
    older = build_native(config, digests, tensors, engine, precision)
    name = "model.layers.1.mlp.up_proj.weight"
    changed = {name: tensors[name] * np.float32(1.1)}
    needed = {key: array for key, array in tensors.items() if key.startswith("model.layers.1.")} | changed
    newer = build_native(config, digests | {"layers.1": Digest(bytes(31) + b"1")}, needed, engine, precision, older)
    assert newer.layers[0] is older.layers[0]
    assert (newer.embedding is older.embedding, newer.head is older.head) == (True, True)
    fresh = build_native(config, {}, tensors | changed, engine, precision)
    assert np.array_equal(Native(newer).logits(prompt(20)), Native(fresh).logits(prompt(20)))
    assert not np.array_equal(Native(newer).logits(prompt(20)), Native(older).logits(prompt(20)))
