"""Bodies of the OpenAI endpoints -> one `GenerateRequest`. Pure: no model, no clock."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, TypeVar

import msgspec

from pdbus.errors import InvalidRequest
from pdbus.messages.common import Sampling
from pdbus.router.openai_body import ChatBody, CompletionBody, Message
from pdbus.router.openai_reasons import explain

Endpoint = Literal["chat.completions", "completions"]
Prompt = str | tuple[int, ...]

MAX_CHOICES = 64
"""Prompts times n of one request."""
B = TypeVar("B", ChatBody, CompletionBody)

_NEUTRAL = Sampling()


@dataclass(frozen=True, slots=True)
class ChatMessage:
    role: str
    content: str
    name: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerateRequest:
    """A validated request. None is absent, and stays so until the model's own defaults are known.

    Every field must be named by results.py, as part of the result key or as neutral.
    """

    endpoint: Endpoint
    model: str
    """The model's name, without `@ref`."""
    ref: str | None
    """What came after `@`: a ref's name, or a root in hex."""
    messages: tuple[ChatMessage, ...]
    """Of a chat; empty for completions."""
    prompts: tuple[Prompt, ...]
    """Of a completion, at least one; empty for chats."""
    max_tokens: int | None
    n: int
    stream: bool
    include_usage: bool
    continuous_usage: bool
    echo: bool
    stop: tuple[str, ...]
    stop_token_ids: tuple[int, ...]
    ignore_eos: bool
    seed: int | None
    temperature: float | None
    top_p: float | None
    top_k: int | None
    min_p: float | None
    repetition_penalty: float | None
    presence_penalty: float | None
    frequency_penalty: float | None
    logit_bias: tuple[tuple[int, float], ...]
    """(token id, bias), sorted by id."""
    logprobs: int | None
    """None: none; else how many best ones beside the chosen token's."""
    return_token_ids: bool
    user: str | None
    timeout_s: float | None

    @property
    def sampling(self) -> Sampling:
        """The wire form, absent values as the neutral ones that OpenAI documents (temperature 1, top_p 1)."""
        return Sampling(
            temperature=_or(self.temperature, _NEUTRAL.temperature),
            top_k=max(_or(self.top_k, _NEUTRAL.top_k), 0),
            top_p=_or(self.top_p, _NEUTRAL.top_p),
            min_p=_or(self.min_p, _NEUTRAL.min_p),
            repetition_penalty=_or(self.repetition_penalty, _NEUTRAL.repetition_penalty),
            presence_penalty=_or(self.presence_penalty, _NEUTRAL.presence_penalty),
            frequency_penalty=_or(self.frequency_penalty, _NEUTRAL.frequency_penalty),
            logit_bias=self.logit_bias,
            logprobs=self.logprobs,
        )

    @property
    def deterministic(self) -> bool:
        """Greedy or seeded: asked again, the answer is the same."""
        return self.temperature == 0 or self.seed is not None


def parse_json(endpoint: Endpoint, body: bytes) -> GenerateRequest:
    """Raises InvalidRequest that names the field, in the caller's terms."""
    try:
        if endpoint == "chat.completions":
            return _chat(msgspec.json.decode(body, type=ChatBody))
        return _completion(msgspec.json.decode(body, type=CompletionBody))
    except msgspec.ValidationError as error:
        raise explain(str(error)) from None
    except (msgspec.DecodeError, RecursionError) as error:
        raise InvalidRequest(f"the body is not valid JSON: {error}") from None


def parse_builtins(endpoint: Endpoint, body: Mapping[str, Any]) -> GenerateRequest:
    """The same rules for a body that was decoded already (the `infer` subject)."""
    try:
        if endpoint == "chat.completions":
            return _chat(msgspec.convert(body, ChatBody))
        return _completion(msgspec.convert(body, CompletionBody))
    except msgspec.ValidationError as error:
        raise explain(str(error)) from None
    except RecursionError:
        raise InvalidRequest("the body is nested too deeply") from None


def _chat(body: ChatBody) -> GenerateRequest:
    if body.top_logprobs is not None and not body.logprobs:
        raise InvalidRequest("top_logprobs needs logprobs to be true", param="top_logprobs")
    if None not in (body.max_tokens, body.max_completion_tokens) and body.max_tokens != body.max_completion_tokens:
        raise InvalidRequest("max_tokens and max_completion_tokens differ; send one", param="max_tokens")
    return _request(
        body,
        endpoint="chat.completions",
        messages=tuple(_message(i, message) for i, message in enumerate(body.messages)),
        max_tokens=_or(body.max_completion_tokens, body.max_tokens),
        logprobs=(body.top_logprobs or 0) if body.logprobs else None,
    )


def _message(index: int, message: Message) -> ChatMessage:
    content = message.content
    if content is None:
        if message.role != "assistant":
            raise InvalidRequest("a message needs content", param=f"messages[{index}].content")
        content = ""
    if not isinstance(content, str):
        content = "".join(part.text for part in content)
    # Chat templates know the system role only; OpenAI's newer name for it means the same.
    return ChatMessage("system" if message.role == "developer" else message.role, content, message.name)


def _completion(body: CompletionBody) -> GenerateRequest:
    n = body.n or 1
    if body.best_of not in (None, n):
        raise InvalidRequest("best_of is not supported beyond n", param="best_of")
    if body.max_tokens == 0 and not body.echo:
        raise InvalidRequest("max_tokens 0 makes sense only with echo", param="max_tokens")
    return _request(
        body,
        endpoint="completions",
        prompts=prompts_of(body.prompt, "prompt"),
        max_tokens=body.max_tokens,
        echo=bool(body.echo),
        logprobs=body.logprobs,
    )


def prompts_of(prompt: str | list[str | int | list[int]], param: str) -> tuple[Prompt, ...]:
    """Every form in which prompts and inputs are given. Raises InvalidRequest that names `param`."""
    if isinstance(prompt, str):
        return (prompt,)
    if all(isinstance(item, int) for item in prompt):
        return (tuple(item for item in prompt if isinstance(item, int)),)
    if any(isinstance(item, int) for item in prompt):
        raise InvalidRequest(f"{param} mixes token ids with texts", param=param)
    prompts = tuple(item if isinstance(item, str) else tuple(item) for item in prompt if not isinstance(item, int))
    if () in prompts:
        raise InvalidRequest(f"a {param} of token ids must not be empty", param=param)
    return prompts


def _request(
    body: ChatBody | CompletionBody,
    *,
    endpoint: Endpoint,
    max_tokens: int | None,
    logprobs: int | None,
    messages: tuple[ChatMessage, ...] = (),
    prompts: tuple[Prompt, ...] = (),
    echo: bool = False,
) -> GenerateRequest:
    name, at, ref = body.model.partition("@")
    options = body.stream_options
    if options is not None and not body.stream:
        raise InvalidRequest("stream_options needs stream to be true", param="stream_options")
    n = body.n or 1
    if n * max(len(prompts), 1) > MAX_CHOICES:
        raise InvalidRequest(f"more than {MAX_CHOICES} choices in one request", param="n")
    request = GenerateRequest(
        endpoint=endpoint,
        model=name,
        ref=ref if at else None,
        messages=messages,
        prompts=prompts,
        max_tokens=max_tokens,
        n=n,
        stream=bool(body.stream),
        include_usage=bool(options and options.include_usage),
        continuous_usage=bool(options and options.continuous_usage_stats),
        echo=echo,
        stop=(body.stop,) if isinstance(body.stop, str) else tuple(body.stop or ()),
        stop_token_ids=tuple(sorted(set(body.stop_token_ids or ()))),
        ignore_eos=bool(body.ignore_eos),
        seed=body.seed,
        temperature=body.temperature,
        top_p=body.top_p,
        top_k=body.top_k,
        min_p=body.min_p,
        repetition_penalty=body.repetition_penalty,
        presence_penalty=body.presence_penalty,
        frequency_penalty=body.frequency_penalty,
        logit_bias=_logit_bias(body.logit_bias or {}),
        logprobs=logprobs,
        return_token_ids=bool(body.return_token_ids),
        user=body.user,
        timeout_s=body.timeout,
    )
    _check_min_tokens(body.min_tokens or 0, request)
    return request


def _logit_bias(bias: dict[str, float]) -> tuple[tuple[int, float], ...]:
    for key in bias:
        if not re.fullmatch(r"0|[1-9][0-9]{0,9}", key):
            raise InvalidRequest(f"logit_bias must map token ids to numbers; {key[:32]!r} is no id", param="logit_bias")
    return tuple(sorted((int(key), value) for key, value in bias.items()))


def _check_min_tokens(min_tokens: int, request: GenerateRequest) -> None:
    """Workers can't hold an end token back, so a minimum is promised only where nothing could end the answer early."""
    if min_tokens == 0:
        return
    if not request.ignore_eos or request.stop or request.stop_token_ids:
        raise InvalidRequest("min_tokens needs ignore_eos, and no stop or stop_token_ids", param="min_tokens")
    if request.max_tokens is not None and min_tokens > request.max_tokens:
        raise InvalidRequest("min_tokens is above max_tokens", param="min_tokens")


T = TypeVar("T")


def _or(value: T | None, default: T) -> T:
    return default if value is None else value
