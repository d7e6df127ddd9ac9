"""nats-py's request, which JetStream rests on: cancelled when its caller is, and failed when NATS refuses it."""

from __future__ import annotations

import asyncio
from secrets import token_hex
from typing import Any

import nats.aio.client
import nats.errors

from pdbus.errors import Forbidden


class RequestingClient(nats.aio.client.Client):  # type: ignore[misc]  # nats-py is untyped
    """A part of GuardedClient."""

    def __init__(self) -> None:
        super().__init__()
        self._asked: dict[str, str] = {}
        """Subjects of the requests in flight, by token."""

    async def _request_new_style(
        self, subject: str, payload: bytes, timeout: float = 1, headers: dict[str, Any] | None = None
    ) -> Any:
        if not self._resp_sub_prefix:
            await self._init_request_sub()
        token = (self._nuid.next() + token_hex(2).encode()).decode()
        answered: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self._resp_map[token], self._asked[token] = answered, subject
        try:
            await self.publish(subject, payload, reply=self._resp_sub_prefix.decode() + token, headers=headers)
            async with asyncio.timeout(timeout):
                return await answered
        except TimeoutError:
            raise nats.errors.TimeoutError from None
        finally:
            self._resp_map.pop(token, None)
            self._asked.pop(token, None)

    def refused(self, subject: str) -> None:
        """`subject` is in lower case: nats-py reads errors so."""
        for token, asked in self._asked.items():
            waiting = self._resp_map.get(token)
            if waiting and not waiting.done() and asked.lower() == subject:
                waiting.set_exception(Forbidden(f"NATS does not let this process publish to {asked}"))
