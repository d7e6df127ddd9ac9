"""What msgspec says of a body, in the caller's terms."""

from __future__ import annotations

import re

from pdbus.errors import InvalidRequest

_UNSUPPORTED = ("tools", "functions", "tool_calls", "suffix")
_MOST_CHARS = 300
"""msgspec repeats a text that is none of those that may be there, however long it is."""


def explain(text: str) -> InvalidRequest:
    """msgspec tells where as "... - at `$.field[0]`"; the caller knows that path as `param`."""
    text, _, path = text.rpartition(" - at `$") if " - at `$" in text else (text, "", "")
    param = path.rstrip("`").lstrip(".") or None
    unknown = re.search(r"unknown field `(.*)`", text)
    if unknown:
        param = ".".join(filter(None, (param, unknown[1])))
        return InvalidRequest(f"unknown field {param[:128]!r}", param=param[:128])
    if param in _UNSUPPORTED or (param or "").endswith(_UNSUPPORTED):
        return InvalidRequest(f"{param} is not supported", param=param)
    return InvalidRequest(f"{param or 'the body'}: {text[0].lower()}{text[1:_MOST_CHARS]}", param=param)
