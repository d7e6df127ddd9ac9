"""What a sequence gets depends neither on how its prompt is cut nor on its neighbours, within fp32 rounding."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from pdbus.kv.codec import export_layer, import_layer
from pdbus.kv.pool import KvPool
from pdbus.model.batch import Batch, SequenceSlice
from pdbus.model.checkpoint import open_checkpoint
from pdbus.model.llama import Llama
from tests.support.checkpoints import tiny_checkpoint
from tests.support.llama import Runner, load

ROUNDING = 5e-5


@pytest.fixture(scope="module", params=["llama", "mistral", "qwen3"])
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Llama:
    torch.set_num_threads(1)
    return load(open_checkpoint(str(tiny_checkpoint(tmp_path_factory.mktemp("model"), request.param))))


def prompt(seed: int, length: int) -> list[int]:
    tokens: list[int] = torch.randint(3, 320, (length,), generator=torch.Generator().manual_seed(seed)).tolist()
    return tokens


def close(left: Tensor, right: Tensor) -> bool:
    return bool((left - right).abs().max() < ROUNDING)


@pytest.mark.parametrize("chunk", [1, 7, 16, 48])
def test_chunks_equal_the_whole(model: Llama, chunk: int) -> None:
    tokens = prompt(1, 100)
    assert close(Runner(model, chunk=chunk).logits(tokens), Runner(model).logits(tokens))


def test_prefill_and_decode_mixed_in_one_batch_equal_each_alone(model: Llama) -> None:
    pool = KvPool(model.page_format(), 40)
    pages = [[3, 17, 9, 30], [0, 1, 2, 4], [39, 5, 38, 6], [20, 21, 22, 23]]
    texts = [prompt(seed, length) for seed, length in enumerate((40, 33, 17, 64))]
    past = [39, 16, 0, 63]  # decoding, a later chunk, a first chunk, decoding
    for text, before, page_ids in zip(texts, past, pages, strict=True):
        if before:
            model.forward(Batch(text[:before], [SequenceSlice(0, before, 0, page_ids)], []), pool)
    tokens: list[int] = []
    slices = []
    for text, before, page_ids in zip(texts, past, pages, strict=True):
        slices.append(SequenceSlice(len(tokens), len(text) - before, before, page_ids))
        tokens += text[before:]
    last_rows = [piece.start + piece.length - 1 for piece in slices]
    together = torch.from_numpy(model.forward(Batch(tokens, slices, last_rows), pool))
    alone = torch.stack([Runner(model).logits(text)[-1] for text in texts])
    assert close(together, alone)


def test_logits_come_only_for_the_rows_asked_for_in_their_order(model: Llama) -> None:
    tokens = prompt(2, 20)
    runner = Runner(model)
    batch = Batch(tokens, [SequenceSlice(0, 20, 0, runner.page_ids)], [19, 4])
    assert close(torch.from_numpy(model.forward(batch, runner.pool)), Runner(model).logits(tokens)[[19, 4]])
    assert model.forward(Batch(tokens, batch.sequences, []), runner.pool).shape == (0, 320)


def test_only_the_sequence_s_own_slots_are_written(model: Llama) -> None:
    pool = KvPool(model.page_format(), 6)
    for layer in range(2):
        pool.layer(layer).fill_(7.0)
    model.forward(Batch(prompt(3, 20), [SequenceSlice(0, 20, 0, [4, 1])], []), pool)
    for layer in range(2):
        assert (pool.layer(layer)[[0, 2, 3, 5]] == 7.0).all()
        assert (pool.layer(layer)[1, :, 4:] == 7.0).all()
        assert (pool.layer(layer)[4] != 7.0).all()


def test_each_layer_is_told_when_its_kv_is_in_the_pool(model: Llama) -> None:
    """The hand-off exports a layer in the call-back: nothing of it may change afterwards."""
    pool, told = KvPool(model.page_format(), 2), {}
    tokens = prompt(4, 32)
    model.forward(
        Batch(tokens, [SequenceSlice(0, 32, 0, [1, 0])], []),
        pool,
        lambda layer: told.setdefault(layer, bytes(export_layer(pool, layer, [1, 0]))) and None,
    )
    assert list(told) == [0, 1]
    assert all(told[layer] == bytes(export_layer(pool, layer, [1, 0])) for layer in told)


def test_handed_over_pages_continue_bitwise_alike(model: Llama) -> None:
    tokens = prompt(5, 33)
    here, there = Runner(model), KvPool(model.page_format(), 8)
    here.logits(tokens[:32])
    for layer in range(2):
        import_layer(there, layer, [6, 2], export_layer(here.pool, layer, here.page_ids[:2]))
    moved = model.forward(Batch(tokens[32:], [SequenceSlice(0, 1, 32, [6, 2, 3])], [0]), there)
    assert torch.equal(torch.from_numpy(moved), here.logits(tokens[32:], past=32))


def test_garbage_in_the_unused_part_of_a_page_is_never_read(model: Llama) -> None:
    tokens, runner = prompt(6, 21), Runner(model)
    for layer in range(2):
        runner.pool.layer(layer).fill_(torch.nan)
    assert close(runner.logits(tokens), Runner(model).logits(tokens))


@pytest.mark.parametrize(
    ("slices", "rows"),
    [
        ([(0, 2, 0)], []),
        ([(0, 2, 0), (3, 1, 0)], []),
        ([(0, 0, 0), (0, 4, 0)], []),
        ([(0, 4, -1)], []),
        ([(0, 4, 0)], [4]),
        ([(0, 4, 0)], [-1]),
    ],
    ids=str,
)
def test_a_batch_that_does_not_add_up_is_refused(slices: list[tuple[int, int, int]], rows: list[int]) -> None:
    with pytest.raises(ValueError, match="batch"):
        Batch([1, 2, 3, 4], [SequenceSlice(*piece, [0]) for piece in slices], rows)


def test_positions_are_each_sequence_s_own() -> None:
    batch = Batch([1, 2, 3, 4], [SequenceSlice(0, 3, 16, [0, 1]), SequenceSlice(3, 1, 0, [2])], [])
    assert batch.positions == [16, 17, 18, 0]
