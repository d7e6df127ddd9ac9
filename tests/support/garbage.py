"""Messages that a subject must refuse: what the codec rejects for its type, drawn by hypothesis, alike in each run."""

from __future__ import annotations

from typing import Any

import msgpack
import msgspec
from hypothesis import HealthCheck, given, reject, settings
from hypothesis import strategies as st

from loadtest.fuzz.noise import message_type
from pdbus.bus.codec import decode
from pdbus.errors import InvalidRequest
from pdbus.subjects import Subject
from tests.support.wire_values import instances

_LEAVES = st.none() | st.booleans() | st.integers(-(2**63), 2**64 - 1) | st.floats() | st.text() | st.binary()
_TREES = st.recursive(
    _LEAVES,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
    max_leaves=12,
)


def garbage(subject: Subject, count: int) -> list[bytes]:
    """`count` payloads that can't be read as the subject's message: noise, msgpack trees, messages with one fault."""
    expected = message_type(subject)
    found: list[bytes] = []

    @settings(max_examples=2 * count, derandomize=True, database=None, suppress_health_check=list(HealthCheck))
    @given(_payloads(expected))
    def collect(payload: bytes) -> None:
        if len(found) < count and (expected is None or _refused(expected, payload)):
            found.append(payload)

    collect()
    assert len(found) == count, f"only {len(found)} payloads of {count} are garbage for {subject}"
    return found


def _payloads(expected: type[Any] | None) -> st.SearchStrategy[bytes]:
    kinds = [st.binary(max_size=512), _TREES.map(_pack)]
    if expected is not None:
        kinds.append(st.builds(_spoil, _messages(expected), st.randoms(), _LEAVES))
    return st.one_of(kinds)


def _messages(expected: type[Any]) -> st.SearchStrategy[Any]:
    return instances(expected)


def _pack(tree: Any) -> bytes:
    try:
        return msgpack.packb(tree, use_bin_type=True)
    except OverflowError:  # an integer beyond 64 bits has no form on the wire
        reject()


def _spoil(message: Any, rng: Any, leaf: Any) -> bytes:
    """A valid message with one field gone or of some other value, or its bytes cut short."""
    fields: dict[str, Any] = msgspec.to_builtins(message, builtin_types=(bytes,))
    fault = rng.choice(("drop", "replace", "cut"))
    if fields and fault != "cut":
        name = rng.choice(sorted(fields))
        if fault == "drop":
            del fields[name]
        else:
            fields[name] = leaf
    payload = _pack(fields)
    return payload[: rng.randrange(len(payload))] if fault == "cut" else payload


def _refused(expected: type[Any], payload: bytes) -> bool:
    try:
        decode(expected, payload)
    except InvalidRequest:
        return True
    return False
