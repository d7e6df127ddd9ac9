"""Sequences without a model, for what needs none."""

from __future__ import annotations

import itertools
from types import SimpleNamespace
from typing import Any

from pdbus.context import Deadline
from pdbus.engine.sequence import Sequence
from pdbus.kv.format import PageFormat
from pdbus.kv.pages import PageTable
from pdbus.kv.prefix import LayerGroup, PrefixScope, page_keys
from pdbus.messages.common import Sampling, Ticket

_NUMBERS = itertools.count(1)

SCOPE = PrefixScope(bytes(32), LayerGroup(0, 1), {}, "class", PageFormat(2, 1, 2, page_tokens=4), b"")


def ticket(prompt: list[int], max_tokens: int = 100, root: bytes = bytes(32), **fields: Any) -> Ticket:
    known: dict[str, Any] = {
        "request_id": f"r{next(_NUMBERS)}",
        "choice": 0,
        "attempt": 1,
        "router": "router",
        "model": "m",
        "root": root,
        "tenant": "anonymous",
        "salt": b"",
        "prompt": tuple(prompt),
        "delivered": (),
        "sampling": Sampling(temperature=0.0),
        "seed": 1,
        "max_tokens": max_tokens,
        "stop_ids": (),
        "deadline_ns": 0,
    }
    return Ticket(**(known | fields))


def sequence(
    pages: PageTable,
    prompt: list[int],
    max_tokens: int = 100,
    *,
    root: bytes = bytes(32),
    cache: bool = False,
    model: Any = None,
    deadline_s: float = 1e9,
    **fields: Any,
) -> Sequence:
    """Of pages of 4 tokens, in a context of 1000. `cache`: it shares and publishes its pages. Without a `model`: those
    of each root need a pass of their own."""
    model = model or SimpleNamespace(kind=root)
    version: Any = SimpleNamespace(config=SimpleNamespace(max_positions=1000), model=model, scope=SCOPE)
    made = ticket(prompt, max_tokens, root)
    keys = page_keys(made.tokens, SCOPE) if cache else ()
    return Sequence(made, version, Deadline(deadline_s), pages.hold(), keys=keys, **fields)
