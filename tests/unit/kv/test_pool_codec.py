from __future__ import annotations

import dataclasses

import pytest
import torch

from pdbus.errors import Corrupt
from pdbus.kv.codec import export_layer, export_page, import_layer, import_page
from pdbus.kv.format import KvDtype, PageFormat
from pdbus.kv.pool import KvPool

FORMAT = PageFormat(layers=2, kv_heads=3, head_dim=4, page_tokens=4)


def random_pool(seed: int, pages: int = 6, dtype: KvDtype = "fp32") -> KvPool:
    """All its slots written."""
    pool, generator = KvPool(dataclasses.replace(FORMAT, dtype=dtype), pages), torch.Generator().manual_seed(seed)
    for layer in range(FORMAT.layers):
        k, v = torch.randn(2, pages * 4, 3, 4, generator=generator)
        pool.write(layer, pool.slots([(range(pages), 0, pages * 4)]), k, v)
    return pool


@pytest.fixture(params=["fp32", "fp16", "int8"])
def dtype(request: pytest.FixtureRequest) -> KvDtype:
    return request.param  # type: ignore[no-any-return]


def test_what_is_written_is_gathered_in_the_order_of_tokens() -> None:
    pool, other = random_pool(0), random_pool(0)
    k, v = torch.randn(2, 6, 3, 4)
    page_ids = [5, 0, 3]
    pool.write(1, pool.slots([(page_ids, 3, 6)]), k, v)  # from the last token of page 5 to the first of page 3
    got_k, got_v = pool.gather(1, pool.page_index(page_ids), 9)
    assert torch.equal(got_k[3:], k)
    assert torch.equal(got_v[3:], v)
    assert torch.equal(got_k[:3], other.layer(1)[5, 0, :3])
    assert torch.equal(pool.layer(0), other.layer(0))
    assert torch.equal(pool.layer(1)[[1, 2, 4]], other.layer(1)[[1, 2, 4]])
    assert torch.equal(pool.layer(1)[3, :, 1:], other.layer(1)[3, :, 1:])


def test_several_sequences_write_in_one_go() -> None:
    pool = random_pool(0)
    k, v = torch.randn(2, 3, 3, 4)
    pool.write(0, pool.slots([([2], 1, 2), ([4, 1], 4, 1)]), k, v)
    assert torch.equal(pool.layer(0)[2, 0, 1:3], k[:2])
    assert torch.equal(pool.layer(0)[1, 1, 0], v[2])


def test_layers_travel_verbatim_to_other_pages(dtype: KvDtype) -> None:
    source, target = random_pool(1, dtype=dtype), random_pool(2, dtype=dtype)
    for layer in range(FORMAT.layers):
        body = export_layer(source, layer, [4, 1])
        assert body.nbytes == 2 * source.format.layer_bytes
        import_layer(target, layer, [0, 5], bytes(body))
        assert export_layer(target, layer, [0, 5]) == body
        assert torch.equal(target.layer(layer)[5], source.layer(layer)[1])
    assert export_page(target, 0) == export_page(source, 4)


def test_pages_travel_verbatim_as_they_do_in_layers(dtype: KvDtype) -> None:
    source, target = random_pool(1, dtype=dtype), random_pool(2, dtype=dtype)
    untouched = export_page(target, 2)
    body = export_page(source, 3)
    assert len(body) == source.format.page_bytes
    import_page(target, 1, bytes(body))
    assert export_page(target, 1) == body
    assert export_page(target, 2) == untouched


def test_not_a_number_survives_the_way() -> None:
    """The bytes are carried, not the numbers: a NaN's payload too."""
    source, target = random_pool(1), random_pool(2)
    body = b"\x01\x00\xc0\x7f" * (FORMAT.page_bytes // 4)
    import_page(source, 0, body)
    import_layer(target, 1, [3], export_layer(source, 1, [0]))
    assert bytes(export_layer(target, 1, [3])) == body[: FORMAT.layer_bytes]


def test_an_export_is_a_copy() -> None:
    pool = random_pool(1)
    bodies = [export_layer(pool, 0, [0]), export_layer(pool, 0, [0, 1]), export_page(pool, 0)]
    before = [bytes(body) for body in bodies]
    pool.bytes.zero_()
    assert [bytes(body) for body in bodies] == before


@pytest.mark.parametrize("page_ids", [[2], [1, 2, 3], [3, 2], [0, 2, 3], [4, 5]], ids=str)
def test_what_is_lent_is_what_is_exported(page_ids: list[int], dtype: KvDtype) -> None:
    pool = random_pool(1, dtype=dtype)
    for layer in range(FORMAT.layers):
        assert pool.lend_bytes(layer, page_ids) == export_layer(pool, layer, page_ids)


@pytest.mark.parametrize("wrong_by", [-1, 1])
def test_a_body_of_the_wrong_size_changes_nothing(wrong_by: int, dtype: KvDtype) -> None:
    pool, before = random_pool(1, dtype=dtype), random_pool(1, dtype=dtype)
    with pytest.raises(Corrupt):
        import_layer(pool, 0, [0, 1], bytes(2 * pool.format.layer_bytes + wrong_by))
    with pytest.raises(Corrupt):
        import_page(pool, 0, bytes(pool.format.page_bytes + wrong_by))
    assert torch.equal(pool.bytes, before.bytes)
