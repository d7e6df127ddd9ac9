"""The sending half of the NATS protocol: publish commands, header blocks, and one ordered way into the socket."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable, Mapping, Sequence

from pdbus.buffer import Buffer
from pdbus.bus.transport import STATUS
from pdbus.errors import TooLarge, Unavailable

FLUSH_BYTES = 256 << 10
"""So much is written out at once; less is written when the loop comes round, in one go."""
HIGH_WATER_BYTES = 2 << 20
STALLED_S = 10.0
"""Longest wait for a full socket; the server cuts a slow reader off after as long."""
SMALL_PART_BYTES = 16 << 10

LONGEST_TARGET = 4000
"""Characters of subject and reply subject together: the server ends the connection over a command line of 4096."""

_END = b"\r\n"
_UNSENDABLE = re.compile("[^!-~]")


def publish(
    subject: str, parts: Sequence[Buffer], reply: str, headers: Mapping[str, str], max_payload: int
) -> list[Buffer]:
    """The command that publishes `parts` as one body, without copying them.

    Raises TooLarge for headers and body above `max_payload` and for an overlong subject, ValueError for what would
    break out of the command."""
    if not subject or _UNSENDABLE.search(subject) or _UNSENDABLE.search(reply):
        raise ValueError(f"{subject!r} (reply to {reply!r}) can't be sent to")
    check_target(subject, reply)
    block = header_block(headers) if headers else b""
    size = len(block) + sum(map(len, parts))
    if size > max_payload:
        raise TooLarge(f"a message of {size} bytes to {subject}; the server takes {max_payload}")
    target = f"{subject} {reply}" if reply else subject
    if block:
        return [f"HPUB {target} {len(block)} {size}\r\n".encode(), block, *parts, _END]
    return [f"PUB {target} {size}\r\n".encode(), *parts, _END]


def check_target(subject: str, reply: str) -> None:
    """Raises TooLarge. Names of peers' choice are in subjects: one that is too long would end the connection."""
    if len(subject) + len(reply) > LONGEST_TARGET:
        raise TooLarge(f"a subject of {len(subject)} characters, reply to one of {len(reply)}: {subject[:64]}…")


def header_block(headers: Mapping[str, str]) -> bytes:
    """Raises ValueError for a line end in a value: it would begin a header, or a command, of the sender's choice."""
    status = headers.get(STATUS)
    lines = [f"NATS/1.0 {status}" if status else "NATS/1.0"]
    lines += [f"{name}: {value}" for name, value in headers.items() if name != STATUS]
    if any("\r" in line or "\n" in line for line in lines):
        raise ValueError("a header value holds a line end")
    return "\r\n".join([*lines, "", ""]).encode()


def read_headers(block: bytes) -> dict[str, str]:
    """Names in lower case; the status of the first line under `status`. Never raises."""
    first, *lines = block.split(_END)
    status = first[8:].strip()[:3]
    found = {STATUS: status.decode("ascii", "replace")} if status else {}
    for line in lines:
        name, colon, value = line.partition(b":")
        if colon:
            found[name.strip().lower().decode("ascii", "replace")] = value.strip().decode("utf-8", "replace")
    return found


class Outbox:
    """What waits to be written to one socket, in the order in which it was put. `socket`: its present stream writer."""

    def __init__(self, socket: Callable[[], asyncio.StreamWriter]) -> None:
        self._socket = socket
        self._parts: list[Buffer] = []
        self._bytes = 0
        self._due = False
        self._closed = False

    def open(self) -> None:
        self._socket().transport.set_write_buffer_limits(high=HIGH_WATER_BYTES)

    def close(self) -> None:
        """Nothing is written any more."""
        self._closed = True
        self._parts.clear()

    def put(self, *parts: Buffer) -> None:
        self._parts.extend(parts)
        self._bytes += sum(map(len, parts))
        if not self._due:
            self._due = True
            asyncio.get_running_loop().call_soon(self._write)

    async def writable(self) -> None:
        """Waits while the socket takes no more. Raises Unavailable; can be cancelled."""
        if self._bytes >= FLUSH_BYTES:
            self._write()
        writer = self._socket()
        if writer.transport.get_write_buffer_size() < HIGH_WATER_BYTES:
            return
        try:
            async with asyncio.timeout(STALLED_S):
                await writer.drain()
        except TimeoutError:
            raise Unavailable("the connection to NATS takes no data") from None
        except OSError as error:
            raise Unavailable(f"the connection to NATS broke ({error})") from None

    def _write(self) -> None:
        """Small parts are joined, large ones handed over as they are: no copy of a bulk body is made here."""
        self._due = False
        parts, self._parts, self._bytes = self._parts, [], 0
        if self._closed or not parts:
            return
        write = self._socket().transport.write
        small: list[Buffer] = []
        for part in parts:
            if len(part) < SMALL_PART_BYTES:
                small.append(part)
                continue
            if small:
                write(b"".join(small))
                small = []
            write(part)
        if small:
            write(b"".join(small))
