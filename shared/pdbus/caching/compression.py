"""zstd where it pays: a sample decides, so that pages of floating-point noise cost nothing to keep as they are."""

from __future__ import annotations

import zstandard

from pdbus.buffer import Buffer

LEVEL = 3
_SMALLEST = 512
"""Below this a frame's own overhead eats most of the gain."""
_SAMPLES = 4
_SAMPLE_BYTES = 4096
_UNKNOWN_SIZE = -1
"""Of a frame that does not say it: then zstandard keeps to what it is told."""
WORTH = 0.85
"""Of what is kept, the compressed form pays if it is at most this part of the original: above that, decompression costs
more time at each hit than the memory is worth."""


def pack(value: Buffer, *, level: int = LEVEL, worth: float = WORTH) -> bytes | None:
    """The compressed form of `value`, or None where it would be larger than `worth` times that. Releases the GIL for
    the main part of its work."""
    if len(value) < _SMALLEST:
        return None
    compressor = zstandard.ZstdCompressor(level=level, write_content_size=True)
    if len(value) > 2 * _SAMPLES * _SAMPLE_BYTES:
        sample = _sample(value)
        if len(compressor.compress(sample)) > worth * len(sample):
            return None
    packed = bytes(compressor.compress(value))
    return packed if len(packed) <= worth * len(value) else None


def unpack(packed: Buffer, size: int) -> bytes:
    """The original of `size` bytes. Raises ValueError if it isn't that, before anything larger is made.

    A frame says by itself what it unpacks to, and zstandard makes room for that, whatever it is told."""
    try:
        if size < 0 or zstandard.frame_content_size(packed) not in (size, _UNKNOWN_SIZE):
            raise ValueError(f"a zstd frame of another size than the {size} bytes that were expected")
        value = bytes(zstandard.ZstdDecompressor().decompress(packed, max_output_size=size))
    except zstandard.ZstdError as error:
        raise ValueError(f"not a zstd frame of {size} bytes: {error}") from None
    if len(value) != size:
        raise ValueError(f"a zstd frame of {len(value)} bytes where {size} were expected")
    return value


def _sample(value: Buffer) -> bytes:
    """Pieces from evenly spaced places: a header or a run of zeros alone must not decide."""
    step = (len(value) - _SAMPLE_BYTES) // (_SAMPLES - 1)
    return b"".join(value[at * step : at * step + _SAMPLE_BYTES] for at in range(_SAMPLES))
