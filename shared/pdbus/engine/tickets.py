"""What a worker checks of a ticket before it takes it. The router has checked the same in the caller's terms."""

from __future__ import annotations

from pdbus.canonical import DIGEST_BYTES
from pdbus.context import Deadline
from pdbus.errors import InvalidRequest, TooLarge
from pdbus.messages.common import Sampling, Ticket, prompt_logprobs_fit
from pdbus.messages.decode import Reserve
from pdbus.model.config import ModelConfig

LONGEST_NAME = 128
MOST_STOP_IDS = 64
MOST_TOP_LOGPROBS = 20


def is_name(text: str) -> bool:
    """Whether it may become a subject token."""
    return 0 < len(text) <= LONGEST_NAME


def check_addressed(ticket: Ticket, model: str) -> Deadline:
    """What needs no version. Returns the ticket's deadline. Raises InvalidRequest or DeadlineExceeded."""
    deadline = Deadline.from_wire(ticket.deadline_ns)
    deadline.check("the request began")
    if ticket.model != model:
        raise InvalidRequest(f"this worker serves {model}, not {ticket.model[:LONGEST_NAME]}", param="model")
    check_attempt(ticket)
    return deadline


def check_attempt(attempt: Ticket | Reserve) -> None:
    """Raises InvalidRequest unless it names an attempt and a router."""
    if not is_name(attempt.request_id) or not is_name(attempt.router):
        raise InvalidRequest(f"request id and router are names of 1 to {LONGEST_NAME} characters", param="request_id")
    if attempt.attempt < 1 or attempt.choice < 0:
        raise InvalidRequest("attempts count from 1 and choices from 0", param="attempt")
    if len(attempt.root) != DIGEST_BYTES:
        raise InvalidRequest(f"a root has {DIGEST_BYTES} bytes", param="root")


def check_ticket(ticket: Ticket, config: ModelConfig) -> None:
    """What the version's shape says of it. Raises InvalidRequest that names the field."""
    if not ticket.prompt:
        raise InvalidRequest("the prompt is empty", param="prompt")
    if len(ticket.tokens) + 1 > config.max_positions:
        raise TooLarge(
            f"{len(ticket.tokens)} tokens leave no room in a context of {config.max_positions}", param="prompt"
        )
    if not all(0 <= token < config.vocab_size for token in ticket.tokens):
        raise InvalidRequest(f"a token id is outside the vocabulary of {config.vocab_size}", param="prompt")
    least = 0 if ticket.prompt_logprobs is not None else 1
    if ticket.max_tokens < len(ticket.delivered) + least:
        raise InvalidRequest(f"max_tokens {ticket.max_tokens} leaves nothing to generate", param="max_tokens")
    if len(ticket.stop_ids) > MOST_STOP_IDS:
        raise TooLarge(f"{len(ticket.stop_ids)} stop ids are more than {MOST_STOP_IDS}", param="stop")
    if not 0 <= ticket.seed < 1 << 64:
        raise InvalidRequest("a seed is an unsigned 64-bit integer", param="seed")
    _check_sampling(ticket.sampling, config)
    _check_prompt_logprobs(ticket)


def _check_sampling(sampling: Sampling, config: ModelConfig) -> None:
    if not all(0 <= token < config.vocab_size for token, _ in sampling.logit_bias):
        raise InvalidRequest("logit_bias names a token outside the vocabulary", param="logit_bias")
    if sampling.repetition_penalty <= 0:
        raise InvalidRequest("repetition_penalty must be above 0", param="repetition_penalty")
    numbers = (
        sampling.temperature,
        sampling.top_p,
        sampling.min_p,
        sampling.repetition_penalty,
        sampling.presence_penalty,
        sampling.frequency_penalty,
        *(bias for _, bias in sampling.logit_bias),
    )
    if not all(abs(number) < 1e9 for number in numbers):  # false for NaN as well
        raise InvalidRequest("a sampling field is not a finite number", param="sampling")
    if sampling.temperature < 0 or not 0 <= sampling.min_p <= 1 or not 0 <= sampling.top_p <= 1 or sampling.top_k < 0:
        raise InvalidRequest("a sampling field is out of its range", param="sampling")
    if sampling.logprobs is not None and not 0 <= sampling.logprobs <= MOST_TOP_LOGPROBS:
        raise InvalidRequest(f"logprobs must be 0 to {MOST_TOP_LOGPROBS}", param="logprobs")


def _check_prompt_logprobs(ticket: Ticket) -> None:
    wanted = ticket.prompt_logprobs
    if wanted is None:
        return
    if not 0 <= wanted <= MOST_TOP_LOGPROBS:
        raise InvalidRequest(f"prompt_logprobs must be 0 to {MOST_TOP_LOGPROBS}", param="prompt_logprobs")
    if not prompt_logprobs_fit(len(ticket.prompt), wanted):
        raise TooLarge("log-probabilities of so long a prompt don't fit into an answer", param="prompt_logprobs")
