"""zstd is used where it pays, and gives back what it was given."""

from __future__ import annotations

import random
import tracemalloc

import pytest
import zstandard
from hypothesis import given
from hypothesis import strategies as st

from pdbus.caching.compression import pack, unpack


@given(value=st.binary(max_size=200), repeats=st.integers(1, 2000))
def test_what_is_packed_unpacks_to_the_same(value: bytes, repeats: int) -> None:
    original = value * repeats
    packed = pack(original)
    if packed is not None:
        assert len(packed) < len(original)
        assert unpack(packed, len(original)) == original


def test_text_is_packed_and_noise_is_not() -> None:
    assert pack(b'{"index": 0, "text": "hello"}' * 1000) is not None
    assert pack(random.Random(1).randbytes(1_000_000)) is None
    assert pack(b"x" * 100) is None


def test_a_compressible_head_does_not_deceive() -> None:
    assert pack(bytes(50_000) + random.Random(1).randbytes(950_000)) is None


@pytest.mark.parametrize("wrong", [b"", b"garbage", pack(bytes(1000))])
def test_a_wrong_frame_is_refused(wrong: bytes) -> None:
    with pytest.raises(ValueError, match="zstd"):
        unpack(wrong, 999)


def test_a_size_that_none_can_have_is_refused() -> None:
    for tells in (True, False):
        frame = zstandard.ZstdCompressor(write_content_size=tells).compress(b"x")
        with pytest.raises(ValueError, match="zstd"):
            unpack(frame, -1)


@pytest.mark.parametrize("says_its_size", [True, False])
def test_a_bomb_is_refused_before_it_goes_off(says_its_size: bool) -> None:
    """64 MiB of zeros are a frame of 2 KB."""
    bomb = zstandard.ZstdCompressor(write_content_size=says_its_size).compress(bytes(64 << 20))
    tracemalloc.start()
    try:
        with pytest.raises(ValueError, match="zstd"):
            unpack(bomb, 1000)
        assert tracemalloc.get_traced_memory()[1] < 1 << 20
    finally:
        tracemalloc.stop()
