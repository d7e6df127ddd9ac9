"""The layout of a bulk frame: a binary prefix, the head (msgpack, in an item's first frame), a run of the body.

A stream is a sequence of items, each a head and a body. A body above the frame size is cut over several frames, so
that item boundaries are kept. Frames are numbered from 0. No NATS headers; the reply subject is the sender's credit
subject, so that the broker's "no responders" comes there too.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass

from pdbus.buffer import Buffer
from pdbus.checksum import crc32
from pdbus.errors import Corrupt

FRAME_BYTES = 640 << 10
"""Body bytes of a frame, at most. Each costs three processes a turn, whatever its size: as large as the server's limit
and what a receiver's budget (bulk.py) has room for allow."""
WINDOW_FRAMES = 8
"""Frames that may be under way on a stream; the receiver grants fewer when it has many streams."""
FIRST_WINDOW_FRAMES = 2
"""Before the first credit."""
TURN_BYTES = 64 << 10
"""After a frame with a body of this size, on either side, whatever else is due in the event loop gets its turn."""
LARGEST_ITEM_BYTES = 64 << 20

SILENCE_S = 2.0
"""So long without the other side's frame or credit is taken for a loss, and told or sent again."""
SILENCES = 3
"""After so many in a row the other side is given up."""

NOBODY_S = 1.0
"""A receiver that was there and has no connection for so long is gone: to make a new one takes less."""
NOBODY_PROBE_S = 0.1

VERSION = 1
ITEM_FIRST = 1
ITEM_LAST = 2
END = 4
"""After the last item; no head, no body."""
ABORT = 8
"""The sender gave up; the body is a WireError. Valid whatever its number."""
ALIVE = 16
"""Numbered like the next frame but not counted: the sender is there and has nothing to send yet."""

_PREFIX = struct.Struct("!BBHIII")
"""version, flags, bytes of the head, sequence, sender's stream number, bytes of the item's whole body."""
_CRC = struct.Struct("!I")
"""CRC-32 of the prefix, the head and the body; it stands between prefix and head."""
_HEAD_AT = _PREFIX.size + _CRC.size


@dataclass(slots=True)
class Frame:
    flags: int
    sequence: int
    stream: int
    """The sender's number of the stream; its credit names it."""
    item_bytes: int
    head: Buffer
    body: Buffer
    more: tuple[Buffer, ...] = ()
    """What comes after it in the body of a frame that is sent, and lies elsewhere in memory."""

    @property
    def body_bytes(self) -> int:
        return len(self.body) + sum(map(len, self.more))

    def parts(self) -> tuple[Buffer, ...]:
        """All but the body, and the body."""
        prefix = _PREFIX.pack(VERSION, self.flags, len(self.head), self.sequence, self.stream, self.item_bytes)
        body = (self.body, *self.more)
        crc = crc32(self.head, crc32(prefix))
        for part in body:
            crc = crc32(part, crc)
        return (b"".join((prefix, _CRC.pack(crc), self.head)), *body)


def read_frame(data: Buffer) -> Frame:
    """The frame in `data`, its parts as views. Raises Corrupt when it is none, or its checksum does not match."""
    if len(data) < _HEAD_AT:
        raise Corrupt("a bulk frame is too short")
    version, flags, head_bytes, sequence, stream, item_bytes = _PREFIX.unpack_from(data)
    body_at = _HEAD_AT + head_bytes
    if version != VERSION or len(data) < body_at:
        raise Corrupt("not a bulk frame")
    view = memoryview(data)
    (crc,) = _CRC.unpack_from(data, _PREFIX.size)
    if crc32(view[_HEAD_AT:], crc32(view[: _PREFIX.size])) != crc:
        raise Corrupt("a bulk frame's checksum does not match")
    return Frame(flags, sequence, stream, item_bytes, view[_HEAD_AT:body_at], view[body_at:])
