"""How nats-py's client comes to a connection: to any of some servers, and by TLS where that was asked for."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import Any

import nats.aio.transport
import nats.errors

from pdbus.bus.nats_requests import RequestingClient
from pdbus.bus.nats_wire import Outbox

log = logging.getLogger(__name__)

DIAL_S = 2.0
READ_BYTES = 1 << 20


class DialingClient(RequestingClient):
    """A part of GuardedClient."""

    def __init__(self) -> None:
        super().__init__()
        self._secure = False
        self._over = False
        self._out = Outbox(lambda: self._transport._io_writer)

    async def dial(
        self, servers: Sequence[str], name: str, options: Mapping[str, Any], patience_s: float = DIAL_S
    ) -> None:
        """Connects to any of `servers`, each tried twice; `options`: of NatsAccess. `patience_s`: for each of a
        server's answers.

        Raises OSError or nats.errors.Error."""
        self._secure = "tls" in options
        try:
            await self.connect(
                servers=list(servers),
                name=name,
                allow_reconnect=False,
                max_reconnect_attempts=1,
                reconnect_time_wait=0.1,
                connect_timeout=patience_s,
                error_cb=_note,
                **options,
            )
        except BaseException:
            self._over = True
            self._abort()
            raise
        self._out.open()

    def _abort(self) -> None:
        writer = self._transport and self._transport._io_writer
        if writer:
            writer.transport.abort()

    async def _connect_to_server(self, s: Any) -> None:
        self._transport = nats.aio.transport.TcpTransport()
        await self._transport.connect(s.uri, buffer_size=READ_BYTES, connect_timeout=self.options["connect_timeout"])

    async def _process_info(self, info: dict[str, Any], initial_connection: bool = False) -> None:
        if self._secure and initial_connection and not info.get("tls_required"):
            # nats-py would go on in the clear, and whoever stands in between could have brought that about
            raise nats.errors.Error("TLS was asked for, and the server does not require it")
        await super()._process_info(info, initial_connection)


async def _note(error: Exception) -> None:
    log.debug("nats-py: %r", error)
