"""nats-py's client with its faults guarded, in this one place.

What nats-py 2.16 does by itself             | here
---------------------------------------------|---------------------------------------------------------------------------
flush() writes PING ahead of pending data    | one ordered queue for everything, so `barrier()` is a barrier
an exception ends the read loop unnoticed    | however that loop ends, the connection counts as lost
a PONG after a timed-out flush raises there  | `_process_pong` looks whether anybody still waits
most -ERR close the client for good          | every error means lost; the owner (nats.py) dials a new client
a hung link stays "connected" for minutes    | the watchdog pings each second; three silent seconds mean lost
reconnecting awaits unsent data first        | no reconnecting in place: the socket is aborted, the client thrown away
requests in flight run into their timeouts   | all waiters fail when the connection is lost
headers escape the payload check             | headers and body are measured together before anything is sent
a blocked publish swallows cancellation      | `writable()` is an ordinary wait with a limit
so does a request whose answer comes with it | `_request_new_style` has no `wait_for` (its fault up to Python 3.11)
a slow callback drops new messages           | callbacks are plain functions called by the reader; queues are their own
bodies sent are copied two to four times     | header line, body parts and line end are written separately
bodies that come are copied five times       | the socket is read straight into a large one (nats_inbound.py)
a raising error callback ends the read loop  | ours only logs
a refused request runs into its timeout      | whoever waits for the answer is told `forbidden` at once
TLS is only used where the server wants it   | where this side wants it, a server without it is refused (nats_dial.py)
"""

from __future__ import annotations

import asyncio
import logging
import re
from collections.abc import Callable, Mapping
from functools import partial

import nats.errors

from pdbus.buffer import Buffer
from pdbus.bus.nats_dial import DialingClient
from pdbus.bus.nats_inbound import Inbound, Work
from pdbus.bus.nats_wire import publish, read_headers
from pdbus.bus.transport import NO_HEADERS, Callback, Raw
from pdbus.errors import Unavailable

log = logging.getLogger(__name__)

PING_EVERY_S = 1.0
SILENT_PINGS = 3
BARRIER_S = 10.0
_QUOTED = re.compile(r'"([^" ]+)')


class GuardedClient(DialingClient):
    """One connection's life. `on_lost` is called once when it ends without `shut()`."""

    def __init__(self, on_lost: Callable[[Exception], None], on_refused: Callable[[str], None]) -> None:
        super().__init__()
        self._on_lost = on_lost
        self._on_refused = on_refused
        self._callbacks: dict[int, Callback] = {}
        self._inbound: Inbound | None = None

    @property
    def alive(self) -> bool:
        return not self._over

    # Sending ---------------------------------------------------------------------------------------------------------

    def send(self, subject: str, *parts: Buffer, reply: str = "", headers: Mapping[str, str] = NO_HEADERS) -> None:
        """Queues one message. Raises TooLarge, Unavailable."""
        if self._over or not self.is_connected:
            raise Unavailable("there is no connection to NATS")
        self._out.put(*publish(subject, parts, reply, headers, self._max_payload))

    async def writable(self) -> None:
        """Waits while the socket takes no more. Raises Unavailable."""
        if self._over:
            raise Unavailable("the connection to NATS broke")
        await self._out.writable()

    # Subscriptions ---------------------------------------------------------------------------------------------------

    def listen(self, subject: str, callback: Callback, queue: str = "") -> int:
        """Subscribes; returns the number by which to `unlisten` and `forget`."""
        self._sid += 1
        self._callbacks[self._sid] = callback
        self._out.put(f"SUB {subject} {queue} {self._sid}\r\n".encode())
        return int(self._sid)

    def unlisten(self, number: int) -> None:
        """Ends the interest; what is on its way is still delivered until `forget`."""
        if not self._over:
            self._out.put(f"UNSUB {number}\r\n".encode())

    def forget(self, number: int) -> None:
        self._callbacks.pop(number, None)

    async def barrier(self, timeout_s: float = BARRIER_S) -> None:
        """Returns when the server has handled all that was sent before. Raises Unavailable."""
        if self._over:
            raise Unavailable("there is no connection to NATS")
        answered: asyncio.Future[bool] = asyncio.get_running_loop().create_future()
        await self._send_ping(answered)
        try:
            async with asyncio.timeout(timeout_s):
                await answered
        except TimeoutError:
            raise Unavailable("NATS does not answer") from None

    # The end ---------------------------------------------------------------------------------------------------------

    def lost(self, error: Exception) -> None:
        """The connection is unusable; every wait on it fails now."""
        if self._over:
            return
        self._end(error)
        self._on_lost(error)

    async def shut(self) -> None:
        """Closes in good order, what was sent before included; also frees what a lost client still holds."""
        try:
            if not self._over:
                await self.barrier(2.0)
        except Unavailable as error:
            log.warning("the connection was closed with unsent data: %s", error.message)
        finally:
            self._end(ConnectionResetError("the connection was closed"))
        tasks = [self._reading_task, self._ping_interval_task, self._flusher_task]
        tasks += [sub._wait_for_msgs_task for sub in self._subs.values()]
        running = [task for task in tasks if task is not None and task is not asyncio.current_task()]
        for task in running:
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)

    def _end(self, error: Exception) -> None:
        self._over = True
        self._out.close()
        self._status = self.CLOSED
        self._abort()
        for waiting in (*self._pongs, *self._resp_map.values()):
            if not waiting.done():
                waiting.set_exception(Unavailable(f"the connection to NATS broke ({error})"))
                waiting.exception()  # not everybody looks at it

    # What nats-py calls ----------------------------------------------------------------------------------------------

    async def _read_loop(self) -> None:
        error, transport = None, self._transport._io_writer.transport
        try:
            early = bytes(self._transport._io_reader._buffer)
            own = Inbound(transport, self._on_message, lambda line: partial(self._ps.parse, line + b"\r\n"), early)
            self._inbound = own
            error = await self._inbound.until_over()
        except Exception as failure:
            error = failure
        finally:
            self.lost(error or nats.errors.UnexpectedEOF())

    def _on_message(self, number: int, subject: bytes, reply: bytes, headers: bytes, body: Buffer) -> Work | None:
        callback = self._callbacks.get(number)
        if callback is None:
            return partial(self._process_msg, number, subject, reply, bytes(body), headers or None)
        try:
            callback(Raw(subject.decode(), reply.decode(), read_headers(headers) if headers else NO_HEADERS, body))
        except Exception:
            log.exception("a subscriber of %r failed", subject)
        return None

    async def _ping_interval(self) -> None:
        """The watchdog: nats-py starts and cancels it with the connection."""
        silent = 0
        while silent < SILENT_PINGS:
            before = self._inbound.reads if self._inbound else 0
            await self._send_ping()
            await asyncio.sleep(PING_EVERY_S)
            silent = silent + 1 if not self._inbound or self._inbound.reads == before else 0
        self.lost(nats.errors.StaleConnectionError())

    async def _send_ping(self, future: asyncio.Future[bool] | None = None) -> None:
        self._pongs.append(future or asyncio.get_running_loop().create_future())
        self._out.put(b"PING\r\n")

    async def _process_pong(self) -> None:
        if self._pongs:
            waiting = self._pongs.pop(0)
            if not waiting.done():
                waiting.set_result(True)

    async def _process_err(self, err_msg: str) -> None:
        if "permissions violation" in err_msg:  # the one kind that leaves the connection open
            log.error("NATS refused something: %s", err_msg)
            refused = _QUOTED.search(err_msg)
            if refused:
                self.refused(refused[1])
                self._on_refused(refused[1])
        else:
            self.lost(nats.errors.Error(f"NATS ended the connection: {err_msg}"))

    async def _process_op_err(self, e: Exception) -> None:
        self.lost(e)

    async def _send_command(self, cmd: bytes, priority: bool = False) -> None:
        self._out.put(cmd)

    async def _flush_pending(self, force_flush: bool = False) -> None:
        if force_flush:
            await self.writable()

    async def _flusher(self) -> None:
        """Nothing to do: writing is the outbox's. nats-py wants a living task of this name."""
        await asyncio.get_running_loop().create_future()
