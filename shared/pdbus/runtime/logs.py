"""Log lines on stderr: text for people, JSON for collectors. Each names the trace that it belongs to."""

from __future__ import annotations

import json
import logging
import re
import time
from typing import Any

from opentelemetry import trace

_CONTROL = re.compile(r"[\x00-\x1f\x7f-\x9f\u2028\u2029]")
_QUIET = ("opentelemetry", "nats", "aiohttp.access", "asyncio")
_QUIETER = ("opentelemetry.trace", "opentelemetry.baggage")
"""What they warn of is the headers that a caller sent, and they quote them: anybody could fill the log with it."""


def configure(service: str, id: str, level: str, style: str) -> None:
    """Sets up the root logger of this process. `style` is "text" or "json". Raises ValueError for an unknown level."""
    handler = logging.StreamHandler()
    handler.setFormatter(_Json(service, id) if style == "json" else _Text(id))
    logging.basicConfig(level=level.upper(), handlers=[handler], force=True)
    for name in _QUIET:
        logging.getLogger(name).setLevel(logging.WARNING)
    for name in _QUIETER:
        logging.getLogger(name).setLevel(logging.ERROR)


def _trace_id() -> str:
    context = trace.get_current_span().get_span_context()
    return trace.format_trace_id(context.trace_id) if context.is_valid else ""


class _Text(logging.Formatter):
    def __init__(self, id: str) -> None:
        super().__init__(f"%(asctime)s %(levelname)-7s {id.replace('%', '%%')} %(name)s: %(message)s%(trace)s")

    def format(self, record: logging.LogRecord) -> str:
        found = _trace_id()
        record.trace = f" trace={found}" if found else ""
        return super().format(record)

    def formatMessage(self, record: logging.LogRecord) -> str:
        """What others sent, and a message quotes, begins no line of its own and steers no terminal."""
        record.message = _CONTROL.sub(lambda found: found[0].encode("unicode_escape").decode(), record.message)
        return super().formatMessage(record)

    def formatException(self, ei: Any) -> str:
        """Likewise: no line of it begins as a message does."""
        lines = super().formatException(ei).splitlines()
        return "\n".join("    " + _CONTROL.sub(" ", line) for line in lines)


class _Json(logging.Formatter):
    def __init__(self, service: str, id: str) -> None:
        super().__init__()
        self._who = {"service": service, "id": id}

    def format(self, record: logging.LogRecord) -> str:
        line = {
            "time": time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created)) + f".{int(record.msecs):03d}Z",
            "level": record.levelname,
            **self._who,
            "logger": record.name,
            "message": record.getMessage(),
        }
        if found := _trace_id():
            line["trace_id"] = found
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return json.dumps(line, ensure_ascii=False)
