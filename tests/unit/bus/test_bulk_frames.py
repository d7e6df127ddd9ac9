"""The layout of bulk frames."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdbus.bus.bulk_frames import Frame, read_frame
from pdbus.errors import Corrupt

U32 = st.integers(0, 2**32 - 1)


@given(st.integers(0, 255), U32, U32, U32, st.binary(max_size=300), st.binary(max_size=300))
def test_a_frame_is_read_as_it_was_written(
    flags: int, sequence: int, stream: int, item_bytes: int, head: bytes, body: bytes
) -> None:
    frame = Frame(flags, sequence, stream, item_bytes, head, body)
    assert read_frame(b"".join(frame.parts())) == frame


@given(st.binary(max_size=100))
def test_garbage_is_corrupt(data: bytes) -> None:
    with pytest.raises(Corrupt):
        read_frame(data)


@given(st.binary(max_size=50), st.binary(max_size=50), st.data())
def test_a_damaged_frame_is_corrupt(head: bytes, body: bytes, data: st.DataObject) -> None:
    whole = bytearray(b"".join(Frame(3, 1, 1, len(body), head, body).parts()))
    at = data.draw(st.integers(0, len(whole) - 1))
    whole[at] ^= data.draw(st.integers(1, 255))
    with pytest.raises(Corrupt):
        read_frame(bytes(whole))
