"""What a caller asks of the param-servers that make versions in other precisions. Pure."""

from __future__ import annotations

from pdbus.errors import InvalidRequest
from pdbus.messages.changelog import Convert
from pdbus.model.convert import PRECISIONS
from pdbus.weights.history import History


def asked_conversion(
    history: History, name: str, precision: str, ref: str | None, follow: bool, author: str
) -> Convert:
    """The entry that asks for it. Raises NotFound for a version that there isn't, InvalidRequest."""
    if precision not in PRECISIONS:
        raise InvalidRequest(f"versions are made in {', '.join(PRECISIONS)}, not in {precision}", param="precision")
    is_line = name in history.refs or history.head(name) is not None
    line = f"{name}-{precision}" if is_line and ref is None else ref or ""
    if line == name:
        raise InvalidRequest(f"what is made of {name} needs another name", param="ref")
    if follow:
        if not is_line:
            raise InvalidRequest(f"{name} is no ref: only a ref's versions can be followed", param="name")
        return Convert(precision, line, author, line=name)
    root = history.head(name) or history.resolve(name)
    if root in history.conversions.sources:
        raise InvalidRequest(f"version {root.hex()[:12]} was made of another one: convert that", param="name")
    return Convert(precision, line, author, root=root)
