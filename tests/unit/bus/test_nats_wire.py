"""What may be put on the wire."""

from __future__ import annotations

import pytest

from pdbus.bus.memory import MemoryBroker, MemoryTransport
from pdbus.bus.nats_wire import LONGEST_TARGET, publish
from pdbus.errors import TooLarge


def test_an_overlong_subject_is_refused_before_the_server_ends_the_connection_over_it() -> None:
    """A peer's name, that of a receiver say, may be part of it."""
    publish("x" * (LONGEST_TARGET - 10), [b""], "y" * 10, {}, 1 << 20)
    with pytest.raises(TooLarge, match="4001 characters"):
        publish("x" * (LONGEST_TARGET + 1), [b""], "", {}, 1 << 20)
    with pytest.raises(TooLarge):
        publish("x", [b""], "y" * LONGEST_TARGET, {}, 1 << 20)


def test_the_twin_refuses_it_too() -> None:
    with pytest.raises(TooLarge):
        MemoryTransport(MemoryBroker()).send("x" * (LONGEST_TARGET + 1))
