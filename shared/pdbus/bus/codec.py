"""Message dataclasses to msgpack and back, checked. Unknown keys are ignored: old services understand newer ones."""

from __future__ import annotations

import re
from typing import NoReturn, TypeVar

import msgpack
import msgspec

from pdbus.errors import InvalidRequest

T = TypeVar("T")

_UNREADABLE = (
    ValueError,
    TypeError,
    OverflowError,
    RecursionError,
    msgpack.UnpackException,
    msgspec.MsgspecError,
)
_WHERE = re.compile(r"(?P<what>.*) - at `\$\.?(?P<field>.*)`", re.DOTALL)


def encode(message: object) -> bytes:
    """The wire form of a message dataclass.

    Raises InvalidRequest for values of the right type that the wire can't carry: an integer beyond 64 bits, half a
    surrogate pair, nesting beyond any sense. They come from callers' JSON."""
    try:
        packed: bytes = msgpack.packb(msgspec.to_builtins(message, builtin_types=(bytes,)))
    except (OverflowError, ValueError, RecursionError) as error:
        raise InvalidRequest(f"a value can't be sent: {error or type(error).__name__}") from None
    return packed


def decode(cls: type[T], data: bytes | bytearray | memoryview) -> T:
    """A checked `cls` from the wire. Raises InvalidRequest, whatever `data` is, and only that; `param`: the field."""
    try:
        # Lengths are limited by the size of `data`, so a small message can't claim a large allocation.
        plain = msgpack.unpackb(data, timestamp=1, ext_hook=_no_extensions)
        return msgspec.convert(plain, cls, builtin_types=(bytes,))
    except msgspec.ValidationError as error:
        found = _WHERE.fullmatch(str(error))
        raise InvalidRequest(str(error), param=found["field"] if found and found["field"] else None) from None
    except _UNREADABLE as error:
        raise InvalidRequest(f"not a msgpack message: {error or type(error).__name__}") from None


def _no_extensions(code: int, data: bytes) -> NoReturn:
    raise ValueError(f"extension type {code}")
