"""What bytes come in, wherever they are not copied."""

from __future__ import annotations

from typing import TypeAlias

Buffer: TypeAlias = bytes | bytearray | memoryview
"""Of single bytes: a memoryview is one-dimensional with format "B"."""
