"""Parts that several messages share."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias

from pdbus.context import DEFAULT_PRIORITY

Digest: TypeAlias = bytes
"""SHA-256, 32 bytes."""


@dataclass(frozen=True, slots=True)
class Sampling:
    """How the next token is chosen. Neutral values switch a step off; temperature 0 is greedy."""

    temperature: float = 1.0
    top_k: int = 0
    """0: off."""
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    """(token id, added to its logit), sorted by id."""
    logprobs: int | None = None
    """None: none wanted; else the chosen token's log-probability and this many best ones (0 to 20)."""


PROMPT_LOGPROB_BYTES = 800_000
"""The log-probabilities of a prompt travel in one item of one frame, which has to fit into a bus message of 1 MiB."""


def prompt_logprobs_fit(prompt_tokens: int, top: int) -> bool:
    """Whether a prompt's log-probabilities, with `top` alternatives for each token, fit into one item."""
    return prompt_tokens * (32 + 16 * top) <= PROMPT_LOGPROB_BYTES


def session_of(request_id: str, choice: int) -> str:
    """Names a choice of a request across attempts; safe as a subject token."""
    return f"{request_id}-{choice}"


@dataclass(frozen=True, slots=True)
class Ticket:
    """What the router hands to a worker: one choice of one request, on one root, in one attempt."""

    request_id: str
    choice: int
    attempt: int
    """Router-minted number of this try, from 1: the generation in every lease, frame and subject of it."""
    router: str
    """Id of the router process; tokens go to its subject."""
    model: str
    root: Digest
    tenant: str
    salt: bytes
    """The tenant's part of every prefix key."""
    prompt: tuple[int, ...]
    delivered: tuple[int, ...]
    """Token ids that the client has already been given: a forced prefix of the answer."""
    sampling: Sampling
    seed: int
    max_tokens: int
    """Length limit of the whole answer, `delivered` included."""
    stop_ids: tuple[int, ...]
    deadline_ns: int
    """Wall-clock nanoseconds."""
    prompt_logprobs: int | None = None
    """As Sampling.logprobs, for the prompt's tokens; such a request bypasses the prefix cache."""
    priority: int = DEFAULT_PRIORITY
    """0 to 9: higher ones go first; fair by tenant among equals."""

    @property
    def session(self) -> str:
        return session_of(self.request_id, self.choice)

    @property
    def interrupted(self) -> bool:
        """Its answer was begun elsewhere: somebody has a part of it, and waits for the next token."""
        return bool(self.delivered)

    @property
    def tokens(self) -> tuple[int, ...]:
        """What prefill has to read: the prompt and what was already delivered."""
        return self.prompt + self.delivered
