"""How often a message was given out is read from where the server says it."""

from __future__ import annotations

import pytest

from pdbus.bus.work import deliveries
from pdbus.errors import InvalidRequest


def test_both_forms_of_the_acknowledgement_subject() -> None:
    assert deliveries("$JS.ACK.PD_JOBS.router-m.3.12.5.1700000000.0") == 3
    assert deliveries("$JS.ACK._.ACCOUNT.PD_JOBS.router-m.4.12.5.1700000000.0") == 4
    assert deliveries("$JS.ACK._.ACCOUNT.PD_JOBS.router-m.4.12.5.1700000000.0.random") == 4
    for other in ("", "_INBOX.x", "$JS.ACK.PD_JOBS.router-m.many.12.5.1.0"):
        with pytest.raises(InvalidRequest):
            deliveries(other)
