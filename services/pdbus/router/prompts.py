"""The prompts of a request as token ids, within the limits of the model. Long ones are read in a thread."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable
from concurrent.futures import Executor
from dataclasses import dataclass
from typing import TypeVar

from pdbus.errors import InvalidRequest, TooLarge
from pdbus.messages.common import prompt_logprobs_fit
from pdbus.router.openai_schema import GenerateRequest, Prompt
from pdbus.router.version import Version

T = TypeVar("T")

DEFAULT_COMPLETION_TOKENS = 16
"""OpenAI's default of max_tokens for completions; a chat may go on to the end of the context."""
_SHORT_CHARS = 2000


@dataclass(frozen=True, slots=True)
class Encoded:
    """One prompt."""

    ids: tuple[int, ...]
    text: str | None
    """As it was given; None where it was given as ids."""


async def encode_prompts(request: GenerateRequest, version: Version, executor: Executor) -> tuple[Encoded, ...]:
    """Checked against the context length and the vocabulary. Raises InvalidRequest, or TooLarge."""
    prompts = await _off_loop(executor, _size(request), lambda: tuple(_encode_all(request, version)))
    for prompt in prompts:
        _check(prompt, request, version)
    vocab = version.config.vocab_size
    for token_id in (*request.stop_token_ids, *(token_id for token_id, _ in request.logit_bias)):
        if token_id >= vocab:
            param = "stop_token_ids" if token_id in request.stop_token_ids else "logit_bias"
            raise InvalidRequest(f"{token_id} is no token id of this model (below {vocab})", param=param)
    return prompts


def most_tokens(request: GenerateRequest, prompt: Encoded, version: Version) -> int:
    """The length limit of the answer to a checked prompt."""
    room = version.config.max_positions - len(prompt.ids)
    if request.max_tokens is not None:
        return request.max_tokens
    return room if request.endpoint == "chat.completions" else min(room, DEFAULT_COMPLETION_TOKENS)


def _encode_all(request: GenerateRequest, version: Version) -> Iterable[Encoded]:
    if request.endpoint == "completions":
        return (_encode(prompt, version, special=True) for prompt in request.prompts)
    if isinstance(version.template, InvalidRequest):
        raise InvalidRequest(version.template.message, param="messages")
    return [_encode(version.template.render(request.messages), version, special=False)]


def _encode(prompt: Prompt, version: Version, *, special: bool) -> Encoded:
    if not isinstance(prompt, str):
        return Encoded(prompt, None)
    if version.tokenizer.at_least(prompt) > version.config.max_positions:
        raise TooLarge(
            f"the prompt has {len(prompt)} characters, more than fit into a context of"
            f" {version.config.max_positions} tokens",
            param="prompt",
        )
    return Encoded(version.tokenizer.encode(prompt, special=special), prompt)


def _check(prompt: Encoded, request: GenerateRequest, version: Version) -> None:
    name = "messages" if request.endpoint == "chat.completions" else "prompt"
    context, size = version.config.max_positions, len(prompt.ids)
    if size == 0:
        raise InvalidRequest("the prompt has no tokens", param=name)
    if size + 1 > context:
        raise TooLarge(f"the prompt has {size} tokens; the model's context of {context} leaves no answer", param=name)
    if request.max_tokens is not None and size + request.max_tokens > context:
        raise TooLarge(
            f"the prompt's {size} tokens and max_tokens {request.max_tokens} exceed the model's context of {context}",
            param="max_tokens",
        )
    if max(prompt.ids) >= version.config.vocab_size:
        raise InvalidRequest(f"{max(prompt.ids)} is no token id of this model", param=name)
    if request.echo and request.logprobs is not None and not prompt_logprobs_fit(size, request.logprobs):
        raise TooLarge("log-probabilities of so long a prompt don't fit into an answer", param="logprobs")


def _size(request: GenerateRequest) -> int:
    return sum(len(message.content) for message in request.messages) + sum(map(len, request.prompts))


async def _off_loop(executor: Executor, size: int, work: Callable[[], T]) -> T:
    if size <= _SHORT_CHARS:
        return work()
    return await asyncio.get_running_loop().run_in_executor(executor, work)
