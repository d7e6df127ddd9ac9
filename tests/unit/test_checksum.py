"""What frames and records carry as a checksum: other programs have to come to the same."""

from __future__ import annotations

import zlib

from hypothesis import given
from hypothesis import strategies as st

from pdbus.checksum import crc32


@given(st.binary(max_size=5000), st.binary(max_size=5000))
def test_it_is_that_of_zlib_in_one_go_and_in_parts(first: bytes, rest: bytes) -> None:
    assert crc32(rest, crc32(first)) == crc32(memoryview(first + rest)) == zlib.crc32(first + rest)
