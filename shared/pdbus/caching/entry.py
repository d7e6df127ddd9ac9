"""One entry of a cache node."""

from __future__ import annotations

import sys
from dataclasses import dataclass

from pdbus.messages.cache import Kind

ENTRY_BYTES = 1400
"""What an entry costs beside its material and value: objects, queues, indexes and its ghost; a test measures it."""


@dataclass(slots=True, eq=False)
class Entry:
    """A value and what it was made from."""

    kind: Kind
    key: bytes
    root: bytes
    tenant: str
    material: bytes
    value: bytes
    """As stored: compressed if `packed`."""
    size: int
    """Bytes of the value as its reader gets it."""
    stored_s: float
    expires_s: float
    packed: bool = False
    name: str = ""

    @property
    def charge(self) -> int:
        """Bytes that this entry takes from the budget."""
        texts = sys.getsizeof(self.name) + sys.getsizeof(self.tenant)
        return ENTRY_BYTES + len(self.material) + len(self.value) + texts
