"""Strategies for messages: any instance of a wire dataclass that msgpack can carry."""

from __future__ import annotations

import dataclasses
import typing
from collections.abc import Mapping
from typing import Any

from hypothesis import strategies as st


def wire_values(hint: Any) -> st.SearchStrategy[Any]:
    """Values of a field's type that msgpack can carry."""
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if dataclasses.is_dataclass(hint) and isinstance(hint, type):
        return instances(hint)
    if hint is int:
        return st.integers(-(2**63), 2**63 - 1)
    if hint is float:
        return st.floats(allow_nan=False)
    if hint is bytes:
        return st.binary(max_size=40)
    if hint is str:
        return st.text(max_size=20)
    if origin in (dict, Mapping):
        _, value = arguments
        loose = st.integers(0, 9) | st.text(max_size=10) | st.none()
        return st.dictionaries(st.text(max_size=10), loose if value is Any else wire_values(value), max_size=3)
    if origin is tuple and arguments[-1] is Ellipsis:
        return st.lists(wire_values(arguments[0]), max_size=3).map(tuple)
    if origin is tuple:
        return st.tuples(*map(wire_values, arguments))
    if origin is typing.Literal:
        return st.sampled_from(arguments)
    if arguments:  # a union
        return st.one_of(*map(wire_values, arguments))
    return st.from_type(hint)


def instances(cls: type[Any]) -> st.SearchStrategy[Any]:
    hints = typing.get_type_hints(cls)
    return st.deferred(
        lambda: st.builds(cls, **{field.name: wire_values(hints[field.name]) for field in dataclasses.fields(cls)})
    )
