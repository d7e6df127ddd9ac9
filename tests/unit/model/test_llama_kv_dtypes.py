"""Rounded KV: the same text however it was computed, handed over or chunked, and near to that of fp32."""

from __future__ import annotations

import random

import pytest
import torch

from pdbus.kv.codec import export_layer, import_layer
from pdbus.kv.format import KvDtype
from pdbus.kv.pool import KvPool
from pdbus.model.batch import Batch, SequenceSlice
from pdbus.model.checkpoint import open_checkpoint
from pdbus.model.llama import Llama
from tests.support.checkpoints import tiny_checkpoint
from tests.support.llama import Runner, load

DTYPES: tuple[KvDtype, ...] = ("fp16", "int8")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Llama:
    torch.set_num_threads(1)
    return load(open_checkpoint(tiny_checkpoint(tmp_path_factory.mktemp("model"), "llama", seed=1)))


def prompt(seed: int, length: int) -> list[int]:
    return random.Random(seed).choices(range(3, 320), k=length)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("chunk", [1, 7, 16])
def test_chunks_equal_the_whole(model: Llama, dtype: KvDtype, chunk: int) -> None:
    """Also what a chunk reads of itself has been rounded: else the whole prompt at once would differ from its parts."""
    tokens = prompt(1, 60)
    whole = Runner(model, kv_dtype=dtype).logits(tokens)
    parts = Runner(model, chunk=chunk, kv_dtype=dtype).logits(tokens)
    rounding = (whole - Runner(model).logits(tokens)).abs().mean()
    assert 0 < rounding < 0.1
    assert (parts - whole).abs().mean() < rounding / 10  # a few values may lie between two steps


@pytest.mark.parametrize("dtype", DTYPES)
def test_handed_over_pages_continue_bitwise_alike(model: Llama, dtype: KvDtype) -> None:
    tokens = prompt(5, 33)
    here, there = Runner(model, kv_dtype=dtype), KvPool(model.page_format(dtype), 8)
    here.logits(tokens[:32])
    for layer in range(2):
        import_layer(there, layer, [6, 2], export_layer(here.pool, layer, here.page_ids[:2]))
    moved = model.forward(Batch(tokens[32:], [SequenceSlice(0, 1, 32, [6, 2, 3])], [0]), there)
    assert torch.equal(torch.from_numpy(moved), here.logits(tokens[32:], past=32))
