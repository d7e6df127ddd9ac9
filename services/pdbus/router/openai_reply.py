"""The objects of OpenAI's API that answers are told in. The OpenAPI document is made from these declarations too."""

from __future__ import annotations

from typing import Literal

from msgspec import UNSET, Struct, UnsetType

Finish = Literal["stop", "length"]


class PromptDetails(Struct, frozen=True):
    cached_tokens: int


class Usage(Struct, frozen=True):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptDetails


class TopLogprob(Struct, frozen=True):
    token: str
    logprob: float
    bytes: list[int]


class ChatLogprob(Struct, frozen=True):
    token: str
    logprob: float
    bytes: list[int]
    top_logprobs: list[TopLogprob]


class ChatLogprobs(Struct, frozen=True):
    content: list[ChatLogprob]
    refusal: None = None


class CompletionLogprobs(Struct, frozen=True):
    """The legacy form: parallel lists, one item for each token."""

    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]


class EmbeddingUsage(Struct, frozen=True):
    prompt_tokens: int
    total_tokens: int


class EmbeddingOut(Struct, frozen=True):
    index: int
    embedding: list[float] | str
    """Numbers, or fp32 in little-endian order as base64."""
    object: Literal["embedding"] = "embedding"


class EmbeddingList(Struct, frozen=True):
    data: list[EmbeddingOut]
    model: str
    usage: EmbeddingUsage
    system_fingerprint: str
    """Names the version that all vectors are of."""
    object: Literal["list"] = "list"


class ChatMessageOut(Struct, frozen=True):
    content: str
    role: Literal["assistant"] = "assistant"
    refusal: None = None


class ChatChoice(Struct, frozen=True):
    index: int
    message: ChatMessageOut
    finish_reason: Finish
    logprobs: ChatLogprobs | None = None
    token_ids: list[int] | UnsetType = UNSET


class ChatDelta(Struct, frozen=True):
    role: Literal["assistant"] | UnsetType = UNSET
    content: str | UnsetType = UNSET


class ChatChunkChoice(Struct, frozen=True):
    index: int
    delta: ChatDelta
    finish_reason: Finish | None = None
    logprobs: ChatLogprobs | None = None
    token_ids: list[int] | UnsetType = UNSET


class CompletionChoice(Struct, frozen=True):
    """Of a whole answer, and of a chunk (then `finish_reason` is null until the last)."""

    index: int
    text: str
    finish_reason: Finish | None = None
    logprobs: CompletionLogprobs | None = None
    token_ids: list[int] | UnsetType = UNSET


class ChatCompletion(Struct, frozen=True, kw_only=True):
    id: str
    object: Literal["chat.completion"] = "chat.completion"
    created: int
    model: str
    system_fingerprint: str
    choices: list[ChatChoice]
    usage: Usage


class ChatChunk(Struct, frozen=True, kw_only=True):
    id: str
    object: Literal["chat.completion.chunk"] = "chat.completion.chunk"
    created: int
    model: str
    system_fingerprint: str
    choices: list[ChatChunkChoice]
    usage: Usage | UnsetType | None = UNSET


class Completion(Struct, frozen=True, kw_only=True):
    id: str
    object: Literal["text_completion"] = "text_completion"
    created: int
    model: str
    system_fingerprint: str
    choices: list[CompletionChoice]
    usage: Usage


class CompletionChunk(Struct, frozen=True, kw_only=True):
    id: str
    object: Literal["text_completion"] = "text_completion"
    created: int
    model: str
    system_fingerprint: str
    choices: list[CompletionChoice]
    usage: Usage | UnsetType | None = UNSET


class ModelCard(Struct, frozen=True, kw_only=True):
    """`id` is what a request names: the model, or the model at a ref."""

    id: str
    object: Literal["model"] = "model"
    created: int
    owned_by: str = "pdbus"
    root: str
    """The version that the name means now, in hex."""


class ModelList(Struct, frozen=True, kw_only=True):
    object: Literal["list"] = "list"
    data: list[ModelCard]


class Health(Struct, frozen=True, kw_only=True):
    status: Literal["ok", "unavailable"]
    detail: str = ""
