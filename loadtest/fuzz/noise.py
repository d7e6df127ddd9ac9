"""Noise, drawn from a seeded generator: values, texts, trees, typed messages with faults, damaged bytes. Pure."""

from __future__ import annotations

import dataclasses
import types
import typing
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from random import Random
from typing import Any, Literal

from pdbus.subjects import Bulk, Event, Log, Rpc, StreamRpc, Subject, Work

INTEGERS = (0, 1, -1, 2, 3, 15, 16, 17, 127, 128, 255, 256, 4096, 65535, 65536, 1 << 20, (1 << 31) - 1, 1 << 31,
            1 << 32, (1 << 53) + 1, (1 << 63) - 1, 1 << 63, (1 << 64) - 1, -(1 << 31), -(1 << 63))  # fmt: skip
_FLOATS = (0.0, -0.0, 0.5, 1.0, -1.0, 1e-300, 1e300, float("inf"), float("-inf"), float("nan"))
_TEXTS = ("", "a", "stable", "0", "-1", "None", "é", "\0", "\n", "‮", "😀", "＜", "..", "../../etc/passwd", "%00",
          "pd.v1.cancel", ">", "*", "a.b", "x" * 129, "x" * 5000, "{{ 7*7 }}", "%s%n", "1e999", "'", '"')  # fmt: skip
_LONGEST = 200

Draw = Callable[[Random], Any]


def integer(rng: Random) -> int:
    if rng.random() < 0.5:
        return rng.choice(INTEGERS)
    return rng.randrange(-(1 << 63), 1 << 64) if rng.random() < 0.2 else rng.randrange(-5, 300)


def number(rng: Random) -> float:
    return rng.choice(_FLOATS) if rng.random() < 0.7 else rng.uniform(-3, 3)


def text(rng: Random) -> str:
    if rng.random() < 0.6:
        return rng.choice(_TEXTS)
    return "".join(chr(rng.choice((rng.randrange(128), rng.randrange(0xD800)))) for _ in range(rng.randrange(12)))


def blob(rng: Random, most: int = _LONGEST) -> bytes:
    return rng.randbytes(rng.choice((0, 1, 7, 8, 31, 32, 33, rng.randrange(most + 1))))


def leaf(rng: Random, binary: bool = True) -> Any:
    """`binary`: bytes too, which JSON has not."""
    draw = rng.choice((integer, number, text, blob if binary else text, lambda _: None, lambda r: r.random() < 0.5))
    return draw(rng)


def tree(rng: Random, binary: bool = True, depth: int = 4) -> Any:
    kind = rng.random()
    if depth == 0 or kind < 0.5:
        return leaf(rng, binary)
    if kind < 0.75:
        return [tree(rng, binary, depth - 1) for _ in range(rng.randrange(4))]
    return {text(rng): tree(rng, binary, depth - 1) for _ in range(rng.randrange(4))}


def nested(rng: Random) -> Any:
    """Deeper than any sense."""
    inner: Any = leaf(rng, binary=False)
    for _ in range(rng.choice((50, 500, 900))):
        inner = [inner] if rng.random() < 0.5 else {"a": inner}
    return inner


def damaged(rng: Random, data: bytes) -> bytes:
    """One to four faults, as a broken disk, a broken peer or somebody with a hex editor would make them."""
    for _ in range(rng.randrange(1, 5)):
        at, length = rng.randrange(len(data) + 1), rng.choice((1, 2, 4, 8, rng.randrange(64)))
        match rng.randrange(7):
            case 0:
                size = rng.choice((1, 2, 4, 8))
                value = (rng.choice(INTEGERS) % (1 << 8 * size)).to_bytes(size, rng.choice(("little", "big")))
                data = data[:at] + value + data[at + size :]
            case 1 if at < len(data):
                data = data[:at] + bytes([data[at] ^ 1 << rng.randrange(8)]) + data[at + 1 :]
            case 2:
                data = data[:at] + data[at + length :]
            case 3:
                data = data[:at] + rng.randbytes(length) + data[at:]
            case 4:
                data = data[: at + length] + data[at:]
            case 5:
                data = data[:at] if rng.random() < 0.5 else data + rng.randbytes(length)
            case _:
                data = data[:at] + rng.randbytes(length) + data[at + length :]
    return data


def spoiled(rng: Random, value: Any, fresh: Draw) -> Any:
    """A tree of dicts and lists with one place changed: replaced by something `fresh`, gone, or twice there."""
    if rng.random() < 0.3 or not isinstance(value, dict | list) or not value:
        return fresh(rng)
    if isinstance(value, list):
        at = rng.randrange(len(value))
        inside = [spoiled(rng, value[at], fresh)] if rng.random() < 0.8 else [value[at]] * rng.choice((0, 2, 100))
        return [*value[:at], *inside, *value[at + 1 :]]
    key = rng.choice(list(value))
    match rng.randrange(8):
        case 0:
            return {name: item for name, item in value.items() if name != key}
        case 1:
            return value | {text(rng): fresh(rng)}
        case 2:
            return {text(rng) if name == key else name: item for name, item in value.items()}
        case 3:
            return value | {key: value[rng.choice(list(value))]}
        case _:
            return value | {key: spoiled(rng, value[key], fresh)}


def message_type(subject: Subject) -> type[Any] | None:
    """What travels there; None for bulk frames, which have their own layout."""
    match subject:
        case Rpc() | StreamRpc():
            return subject.request
        case Event() | Log() | Work():
            return subject.message
        case Bulk():
            return None
    raise TypeError(f"{subject!r} is of no known kind")


class Messages:
    """Wire messages as plain data, right by their types; `pools`: further texts and bytes that mean something here."""

    def __init__(self, pools: Mapping[type, Sequence[Any]]) -> None:
        self._pools = pools

    def of(self, rng: Random, hint: Any) -> Any:
        """A value that the type admits."""
        origin, inner = typing.get_origin(hint), typing.get_args(hint)
        if dataclasses.is_dataclass(hint):
            return {
                name: self.of(rng, kind)
                for name, kind, needed in fields(hint)  # type: ignore[arg-type]
                if needed or rng.random() < 0.7
            }
        if origin in (types.UnionType, typing.Union):
            return self.of(rng, rng.choice(inner))
        if origin is Literal:
            return rng.choice(inner)
        if origin is tuple and inner[-1] is Ellipsis:
            return [self.of(rng, inner[0]) for _ in range(rng.choice((0, 1, 2, 3, 40)))]
        if origin is tuple:
            return [self.of(rng, kind) for kind in inner]
        if origin is dict:
            return {self.of(rng, inner[0]): tree(rng, depth=2) for _ in range(rng.randrange(5))}
        return self._plain(rng, hint)

    def _plain(self, rng: Random, hint: Any) -> Any:
        pool = self._pools.get(hint, ())
        if pool and rng.random() < 0.6:
            return rng.choice(pool)
        plain: dict[Any, Draw] = {
            str: text, bytes: blob, int: integer, float: number, bool: lambda r: r.random() < 0.5,
            type(None): lambda _: None, Any: tree,
        }  # fmt: skip
        return plain[hint](rng)


@cache
def fields(message: type[Any]) -> tuple[tuple[str, Any, bool], ...]:
    """(name, type, whether it must be there)."""
    hints = typing.get_type_hints(message)
    missing = dataclasses.MISSING
    return tuple(
        (each.name, hints[each.name], each.default is missing and each.default_factory is missing)
        for each in dataclasses.fields(message)
    )
