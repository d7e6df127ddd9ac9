"""The result cache: finished answers to greedy and seeded requests, kept as token ids.

Text, logprobs and chunks are made from the ids again by the same code that made them first, so streamed and whole
answers share an entry.
"""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from pdbus.bus.codec import decode, encode
from pdbus.caching.result_key import ResultKey, result_key
from pdbus.canonical import Value
from pdbus.context import LONGEST_DEADLINE_S, RequestContext
from pdbus.errors import PdbusError
from pdbus.messages.cache import Kind
from pdbus.messages.common import Digest
from pdbus.messages.router import TokenLogprob
from pdbus.router.openai_schema import GenerateRequest
from pdbus.router.output import ChoiceOutput, Reason

log = logging.getLogger(__name__)

JOINS: Mapping[str, str] = {
    "endpoint": "endpoint",
    "n": "n",
    "echo": "echo",
    "stop": "stop",
    "stop_token_ids": "stop_ids",
    "ignore_eos": "ignore_eos",
    "temperature": "temperature",
    "top_p": "top_p",
    "top_k": "top_k",
    "min_p": "min_p",
    "repetition_penalty": "repetition_penalty",
    "presence_penalty": "presence_penalty",
    "frequency_penalty": "frequency_penalty",
    "logit_bias": "logit_bias",
    "logprobs": "logprobs",
}
"""Fields of GenerateRequest that join the key, and their names there."""

RESOLVED = frozenset({"model", "ref", "messages", "prompts", "max_tokens", "seed"})
"""Join in the form that they were resolved to: the model's name, root, token ids, limits, the seed in force."""

NEUTRAL = frozenset({"stream", "include_usage", "continuous_usage", "return_token_ids", "user", "timeout_s"})
"""Can't change what is answered, only how it is told."""

_MOST_STORED_BYTES = 900_000


class Ring(Protocol):
    """A CacheRing, as far as answers need it."""

    async def get(
        self,
        kind: Kind,
        keys: Sequence[Digest],
        root: Digest,
        materials: Sequence[bytes],
        ctx: RequestContext,
        *,
        max_age_s: float | None = None,
    ) -> list[bytes | None]: ...

    def put(
        self,
        kind: Kind,
        key: Digest,
        root: Digest,
        material: bytes,
        value: bytes,
        ctx: RequestContext,
        *,
        ttl_s: float,
    ) -> bool: ...


@dataclass(frozen=True, slots=True)
class StoredChoice:
    ids: tuple[int, ...]
    finish: Reason
    logprobs: tuple[TokenLogprob, ...] = ()
    prompt_logprobs: tuple[TokenLogprob, ...] | None = None


@dataclass(frozen=True, slots=True)
class StoredAnswer:
    """Everything of an answer that isn't worked out from the request again."""

    root: Digest
    choices: tuple[StoredChoice, ...]


def key_of(
    request: GenerateRequest,
    *,
    tenant: str,
    salt: bytes,
    root: Digest,
    compute_class: str,
    tokens: Sequence[Sequence[int]],
    limits: Sequence[int],
    seed: int | None,
) -> ResultKey:
    """`salt`: the tenant's (identity.py).
    `limits`: most tokens of the answer to each prompt. `seed`: the one in force; None for greedy requests without.

    Raises TypeError for a field of the request that is neither joined, resolved nor neutral."""
    fields: dict[str, Value] = {
        "tenant": tenant,
        "model": request.model,
        "root": root,
        "compute_class": compute_class,
        # Each prompt behind its length: no two lists of prompts read the same.
        "tokens": [number for ids in tokens for number in (len(ids), *ids)],
        "max_tokens": list(limits),
    }
    if seed is not None:
        fields["seed"] = seed
    for field in dataclasses.fields(request):
        value = getattr(request, field.name)
        if field.name in JOINS:
            if value is not None:
                fields[JOINS[field.name]] = value
        elif field.name not in RESOLVED | NEUTRAL:
            raise TypeError(f"{field.name} neither joins the result key nor is it declared neutral")
    return result_key(fields, salt)


class Results:
    """Reads and writes answers. Writing goes on beside and after the request, in the ring."""

    def __init__(self, ring: Ring, ttl_s: float) -> None:
        self._ring = ring
        self._ttl_s = ttl_s

    async def get(
        self, key: ResultKey, root: Digest, ctx: RequestContext, *, max_age_s: float | None, choices: int
    ) -> StoredAnswer | None:
        """None for a miss, and for whatever can't be used."""
        (value,) = await self._ring.get("result", [key.key], root, [key.material], ctx, max_age_s=max_age_s)
        if value is None:
            return None
        try:
            stored = decode(StoredAnswer, value)
        except PdbusError as error:
            log.warning("a cached answer can't be read: %s", error.message)
            return None
        return stored if stored.root == root and len(stored.choices) == choices else None

    def put(
        self, key: ResultKey, root: Digest, ctx: RequestContext, outputs: Sequence[ChoiceOutput], *, once: bool
    ) -> None:
        """Keeps a whole answer; one with a choice that has not ended is a programming error (ValueError).

        `once`: only a repetition of this very request can ask for it, so not for longer than any request lives."""
        value = encode(StoredAnswer(root, tuple(map(_stored, outputs))))
        if len(value) <= _MOST_STORED_BYTES:
            ttl_s = min(self._ttl_s, LONGEST_DEADLINE_S) if once else self._ttl_s
            self._ring.put("result", key.key, root, key.material, value, ctx, ttl_s=ttl_s)


def _stored(output: ChoiceOutput) -> StoredChoice:
    if output.finish is None:
        raise ValueError("only whole answers are kept")
    return StoredChoice(tuple(output.ids), output.finish, tuple(output.logprobs), output.prompt_logprobs)
