"""The tail of a log without what is in it: the size of each entry, as it is stored."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeAlias

from pdbus.bus.instruments import Instruments
from pdbus.bus.jetstream import JetStream
from pdbus.bus.nats import NatsTransport
from pdbus.bus.tail import STORED_NS, Tail, part_of
from pdbus.bus.transport import Raw
from pdbus.subjects import Log, ToEvent

RESERVES = "pd-reserves"
"""Header of an entry: so many bytes are set aside for what belongs to it, until the subject's next one."""
_SIZE = "nats-msg-size"
_ROLLUP = "nats-rollup"


@dataclass(frozen=True, slots=True)
class Size:
    """Of one entry."""

    subject: str
    bytes: int
    """Of its body."""
    at_s: float
    """Wall clock of the server, when it was stored."""
    replaces: bool
    """All earlier ones of its subject are gone."""
    reserves: int


TakeSize: TypeAlias = Callable[[Size], None]


class SizeTail(Tail[object]):
    """As Tail."""

    headers_only = True

    def __init__(
        self,
        to: ToEvent[object],
        subject: Log[object],
        after: int,
        take: TakeSize,
        transport: NatsTransport,
        js: JetStream,
        instruments: Instruments,
    ) -> None:
        super().__init__(to, subject, after, lambda seq, entry: None, transport, js, instruments)
        self._take_size = take

    def _give(self, seq: int, raw: Raw) -> None:
        headers = raw.headers
        self._take_size(
            Size(
                raw.subject,
                int(headers.get(_SIZE, len(raw.data))),
                int(part_of(raw.reply, STORED_NS)) / 1e9,
                _ROLLUP in headers,
                _whole(headers.get(RESERVES, "")),
            )
        )
        self.seq = seq


def _whole(text: str) -> int:
    return int(text) if text.isascii() and text.isdigit() and len(text) < 16 else 0
