"""What a KV dtype does to numbers: once, the same for every way of writing them, and within a known bound."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from pdbus.kv.codec import export_layer
from pdbus.kv.format import KvDtype, PageFormat
from pdbus.kv.pool import KvPool

BOUNDS: dict[KvDtype, float] = {"fp32": 0.0, "fp16": 2.0**-11, "int8": 0.5 / 127 + 1e-6}
"""Largest error, as a part of the largest magnitude of the token and head."""


def pool_of(dtype: KvDtype) -> KvPool:
    return KvPool(PageFormat(layers=1, kv_heads=3, head_dim=8, page_tokens=4, dtype=dtype), 4)


def written(dtype: KvDtype, k: Tensor, v: Tensor, chunk: int = 100) -> KvPool:
    """k and v in all 16 slots, `chunk` tokens at a time."""
    pool = pool_of(dtype)
    for start in range(0, 16, chunk):
        part = slice(start, min(start + chunk, 16))
        pool.write(0, pool.slots([([2, 0, 3, 1], start, part.stop - start)]), k[part], v[part])
    return pool


def numbers() -> Tensor:
    """Heads of very different sizes, [2, 16, 3, 8]."""
    return torch.randn(2, 16, 3, 8, generator=torch.Generator().manual_seed(3)) * 10.0 ** torch.arange(-2, 1)[:, None]


@pytest.mark.parametrize("dtype", list(BOUNDS))
def test_what_is_read_is_what_was_written_within_the_dtype_s_error(dtype: KvDtype) -> None:
    k, v = numbers()
    pool = written(dtype, k, v)
    for got, wanted in zip(pool.gather(0, pool.page_index([2, 0, 3, 1]), 16), (k, v), strict=True):
        assert got.dtype == torch.float32
        assert ((got - wanted).abs() <= BOUNDS[dtype] * wanted.abs().amax(-1, keepdim=True)).all()


@pytest.mark.parametrize("dtype", list(BOUNDS))
def test_the_bytes_do_not_depend_on_what_is_written_beside_them(dtype: KvDtype) -> None:
    k, v = numbers()
    whole, single = written(dtype, k, v), written(dtype, k, v, chunk=1)
    assert export_layer(whole, 0, range(4)) == export_layer(single, 0, range(4))


def test_int8_is_one_run_of_values_then_scales() -> None:
    """As kernels and other languages read it: from the exported bytes alone, by the layout in kv/format.py."""
    k, v = numbers()
    pool = written("int8", k, v)
    body = torch.frombuffer(bytearray(export_layer(pool, 0, [2])), dtype=torch.uint8)
    values = body[: 2 * 4 * 3 * 8].view(torch.int8).view(2, 4, 3, 8)
    scales = body[2 * 4 * 3 * 8 :].view(torch.float32).view(2, 4, 3)
    x = torch.stack([k[:4], v[:4]])
    assert torch.equal(scales, x.abs().amax(-1) / 127)
    assert torch.equal(values, (x / scales[..., None]).round().to(torch.int8))
    got_k, got_v = pool.gather(0, pool.page_index([2]), 4)
    assert torch.equal(torch.stack([got_k, got_v]), values * scales[..., None])


@pytest.mark.parametrize("dtype", list(BOUNDS))
def test_zeros_and_the_smallest_numbers_stay_finite(dtype: KvDtype) -> None:
    k = torch.zeros(16, 3, 8)
    k[1] = 1e-45
    pool = written(dtype, k, k)
    got, _ = pool.gather(0, pool.page_index([2, 0, 3, 1]), 16)
    assert (got.abs() <= 1e-37).all()


def test_fp16_keeps_what_is_too_large_at_its_limit() -> None:
    k = torch.full((16, 3, 8), 1e6)
    pool = written("fp16", k, -k)
    got_k, got_v = pool.gather(0, pool.page_index([0]), 4)
    assert (got_k == 65504).all()
    assert (got_v == -65504).all()


@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_what_is_no_number_never_becomes_one_in_int8(bad: float) -> None:
    """So that the engine sees it in the logits and fails the answer, as it does in fp32."""
    k = torch.ones(16, 3, 8)
    k[0, 0, 0] = bad
    pool = written("int8", k, k)
    got, _ = pool.gather(0, pool.page_index([2]), 4)
    assert got[0, 0].isnan().any()
    assert got[1:].isfinite().all()
