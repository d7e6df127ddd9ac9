"""Message dataclasses to msgpack and back, checked. Unknown keys are ignored: old services understand newer ones."""

from __future__ import annotations

import re
from typing import NoReturn, TypeVar

import msgspec

from pdbus.errors import InvalidRequest

T = TypeVar("T")

_UNREADABLE = (ValueError, TypeError, OverflowError, RecursionError, msgspec.MsgspecError)
_WHERE = re.compile(r"(?P<what>.*) - at `\$\.?(?P<field>.*)`", re.DOTALL)


def encode(message: object) -> bytes:
    """The wire form of a message dataclass.

    Raises InvalidRequest for values of the right type that the wire can't carry: an integer beyond 64 bits, half a
    surrogate pair, nesting beyond any sense. They come from callers' JSON."""
    try:
        return msgspec.msgpack.encode(message)
    except (OverflowError, ValueError, RecursionError) as error:
        raise InvalidRequest(f"a value can't be sent: {error or type(error).__name__}") from None


def decode(cls: type[T], data: bytes | bytearray | memoryview) -> T:
    """A checked `cls` from the wire. Raises InvalidRequest, whatever `data` is, and only that; `param`: the field."""
    try:
        # Lengths are checked against the size of `data`, so a small message can't claim a large allocation.
        return msgspec.msgpack.decode(data, type=cls, ext_hook=_no_extensions)
    except msgspec.ValidationError as error:
        found = _WHERE.fullmatch(str(error))
        raise InvalidRequest(str(error), param=found["field"] if found and found["field"] else None) from None
    except _UNREADABLE as error:
        raise InvalidRequest(f"not a msgpack message: {error or type(error).__name__}") from None


def _no_extensions(code: int, data: memoryview) -> NoReturn:
    raise ValueError(f"extension type {code}")
