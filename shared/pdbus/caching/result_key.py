"""The key of a finished answer: deny by default.

Every field of a request either joins the key or is declared neutral; a field that is neither is refused, so that a new
one can't be forgotten. A field that was not given joins as an explicit "absent": never as a default, which may change,
and never as null, which somebody may send.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping
from dataclasses import dataclass

from pdbus import canonical
from pdbus.canonical import Value

SCHEMA_VERSION = 1
"""Raised whenever the meaning of a field or the form of a cached answer changes."""


class UndeclaredField(TypeError):
    """A field that neither joins the key nor is declared neutral, or a required one that is missing."""


@dataclass(frozen=True, slots=True)
class KeySchema:
    """Which fields make an answer what it is."""

    required: frozenset[str]
    """Join, and must be there: without them no key is sound."""
    joins: frozenset[str]
    """Join, as "absent" where not given."""
    neutral: frozenset[str]
    """Can't change the answer's content."""


RESULT_FIELDS = KeySchema(
    required=frozenset({"tenant", "model", "root", "compute_class", "tokens"}),
    joins=frozenset(
        {
            "endpoint", "tools", "tool_choice", "parallel_tool_calls", "response_format", "reasoning_effort",
            "temperature", "top_p", "top_k", "min_p", "seed", "choice", "n", "best_of",
            "presence_penalty", "frequency_penalty", "repetition_penalty", "logit_bias",
            "max_tokens", "min_tokens", "stop", "stop_ids", "ignore_eos",
            "logprobs", "top_logprobs", "prompt_logprobs", "echo", "suffix",
        }
    ),
    neutral=frozenset(
        {
            "stream", "stream_options", "user", "metadata", "store", "service_tier",
            "request_id", "idempotency_key", "deadline", "timeout", "cache",
        }
    ),
)  # fmt: skip
"""A generation request, by the fields' OpenAI names where they have one. `root`: the resolved one, never a ref."""


@dataclass(frozen=True, slots=True)
class ResultKey:
    key: bytes
    """HMAC-SHA256 of `material` under the tenant's salt: the entry's address."""
    material: bytes
    """Stored in the entry and compared on a hit, so that not even a colliding digest gives a foreign answer."""


def result_key(fields: Mapping[str, Value], salt: bytes) -> ResultKey:
    """The key of the answer to `fields`, for the tenant of that salt.

    Raises UndeclaredField for a field that RESULT_FIELDS doesn't know and for a missing required one; ValueError or
    TypeError for a value without a canonical encoding (NaN, foreign types).
    """
    joining = RESULT_FIELDS.required | RESULT_FIELDS.joins
    unknown = fields.keys() - joining - RESULT_FIELDS.neutral
    if unknown:
        raise UndeclaredField(f"neither in the result key nor declared neutral: {', '.join(sorted(unknown))}")
    missing = RESULT_FIELDS.required - fields.keys()
    if missing:
        raise UndeclaredField(f"no result key without {', '.join(sorted(missing))}")
    # An absent field is [], a present one [value]: no value can pose as absence.
    parts: dict[str, Value] = {name: [fields[name]] if name in fields else [] for name in joining}
    parts["tokens"] = _packed(fields["tokens"])
    material = canonical.encode(["pdbus result", SCHEMA_VERSION, parts])
    return ResultKey(canonical.salted_digest(salt, material), material)


def _packed(tokens: Value) -> bytes:
    """Token ids as 4 bytes each: entries hold their material, and a long prompt is most of it."""
    if not isinstance(tokens, list | tuple) or not all(type(token) is int and 0 <= token < 1 << 32 for token in tokens):
        raise TypeError("tokens must be a list of token ids")
    return struct.pack(f">{len(tokens)}I", *tokens)


def deterministic(fields: Mapping[str, Value]) -> bool:
    """Whether the same fields give the same answer again: an explicit temperature of 0, or a seed of the caller's own.

    An absent temperature is not 0, and a seed that the router drew itself doesn't count: leave it out of `fields`.
    """
    temperature = fields.get("temperature")
    greedy = isinstance(temperature, int | float) and not isinstance(temperature, bool) and temperature == 0
    return greedy or fields.get("seed") is not None
