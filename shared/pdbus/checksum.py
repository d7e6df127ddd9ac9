"""CRC-32 as zlib has it, of what is large: 14 times as fast by the package isal, which uses the processor's own means.

All that goes over the bulk streams and onto the disks of cache nodes is checked by it, pages of KV twice on their way.
"""

from __future__ import annotations

try:
    from isal.isal_zlib import crc32
except ImportError:  # there is none for this platform: the same numbers, later
    from zlib import crc32

__all__ = ["crc32"]
