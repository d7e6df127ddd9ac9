"""The bodies of the OpenAI endpoints as they arrive: one field per accepted name, with its type and range.

`msgspec` checks a body against these in C, and the OpenAPI document is generated from them, so what is served and what
is documented can't differ. `null` means absent everywhere, as OpenAI's clients send it.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from msgspec import Meta, Struct

Text = Annotated[str, Meta(max_length=4_000_000)]
StopString = Annotated[str, Meta(min_length=1, max_length=256)]
TokenId = Annotated[int, Meta(ge=0, le=2**31 - 1)]
Bias = Annotated[float, Meta(ge=-100, le=100)]
ModelName = Annotated[
    str, Meta(min_length=1, max_length=256, description="NAME, NAME@REF or NAME@ROOT (hex, 6 digits or more)")
]
Unused = Annotated[None, Meta(description="Not supported: only null is accepted.")]


class TextPart(Struct, frozen=True, forbid_unknown_fields=True):
    """A part of a message; only text is served."""

    type: Literal["text"]
    text: Text


class Message(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """One message of a chat. The unused fields are those that clients send back with an assistant's message."""

    role: Literal["system", "developer", "user", "assistant"]
    content: Text | Annotated[list[TextPart], Meta(max_length=1024)] | None = None
    name: Annotated[str, Meta(max_length=256)] | None = None
    refusal: Text | None = None
    tool_calls: Annotated[list[Any], Meta(max_length=0)] | None = None
    function_call: Unused = None
    audio: Unused = None
    annotations: Annotated[list[Any], Meta(max_length=0)] | None = None


class StreamOptions(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    include_usage: bool | None = None
    """A last chunk that holds the usage and no choice."""
    continuous_usage_stats: bool | None = None
    """The usage so far in every chunk."""
    include_obfuscation: bool | None = None


class ResponseFormat(Struct, frozen=True, forbid_unknown_fields=True):
    type: Literal["text"]


class Body(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """What both endpoints take. The second group are extensions under the names that vLLM gave them."""

    model: ModelName
    temperature: Annotated[float, Meta(ge=0, le=2)] | None = None
    top_p: Annotated[float, Meta(gt=0, le=1)] | None = None
    presence_penalty: Annotated[float, Meta(ge=-2, le=2)] | None = None
    frequency_penalty: Annotated[float, Meta(ge=-2, le=2)] | None = None
    logit_bias: Annotated[dict[str, Bias], Meta(max_length=1024)] | None = None
    n: Annotated[int, Meta(ge=1, le=32)] | None = None
    seed: Annotated[int, Meta(ge=-(2**63), le=2**63 - 1)] | None = None
    stop: StopString | Annotated[list[StopString], Meta(max_length=16)] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    user: Annotated[str, Meta(max_length=512)] | None = None

    top_k: Annotated[int, Meta(ge=-1, le=2**31 - 1, description="0 and -1: off")] | None = None
    min_p: Annotated[float, Meta(ge=0, le=1)] | None = None
    repetition_penalty: Annotated[float, Meta(gt=0, le=10)] | None = None
    ignore_eos: bool | None = None
    stop_token_ids: Annotated[list[TokenId], Meta(max_length=64)] | None = None
    min_tokens: (
        Annotated[
            int,
            Meta(ge=0, le=2**31 - 1, description="Above 0 only with ignore_eos and no stop"),
        ]
        | None
    ) = None
    return_token_ids: Annotated[bool, Meta(description="Choices carry `token_ids` beside their text")] | None = None
    timeout: Annotated[float, Meta(gt=0, le=600, description="Seconds until the request is given up")] | None = None


class ChatBody(Body, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """POST /v1/chat/completions."""

    messages: Annotated[list[Message], Meta(min_length=1, max_length=4096)]
    max_completion_tokens: Annotated[int, Meta(ge=1, le=2**31 - 1)] | None = None
    max_tokens: Annotated[int, Meta(ge=1, le=2**31 - 1)] | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Meta(ge=0, le=20)] | None = None
    response_format: ResponseFormat | None = None
    modalities: Annotated[list[Literal["text"]], Meta(max_length=1)] | None = None

    # Accepted because OpenAI's clients send them; they change nothing here.
    metadata: Annotated[dict[str, str], Meta(max_length=16)] | None = None
    store: bool | None = None
    service_tier: Literal["auto", "default"] | None = None
    safety_identifier: Annotated[str, Meta(max_length=512)] | None = None
    prompt_cache_key: Annotated[str, Meta(max_length=512)] | None = None
    parallel_tool_calls: bool | None = None

    # Refused unless they ask for nothing.
    tools: Annotated[list[Any], Meta(max_length=0, description="Tools are not supported.")] | None = None
    tool_choice: Literal["none", "auto"] | None = None
    functions: Annotated[list[Any], Meta(max_length=0, description="Functions are not supported.")] | None = None
    function_call: Literal["none", "auto"] | None = None


class EmbeddingBody(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """POST /v1/embeddings. `input`: as `prompt` of completions; token ids are taken as they are."""

    model: ModelName
    input: Text | Annotated[list[Text | TokenId | list[TokenId]], Meta(min_length=1)]
    encoding_format: Literal["float", "base64"] | None = None
    dimensions: (
        Annotated[int, Meta(ge=1, le=2**31 - 1, description="Only the model's own: vectors are not cut")] | None
    ) = None
    user: Annotated[str, Meta(max_length=512)] | None = None
    timeout: Annotated[float, Meta(gt=0, le=600, description="Seconds until the request is given up")] | None = None


class CompletionBody(Body, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """POST /v1/completions. `prompt`: a string, a list of strings, a list of token ids, or a list of such lists."""

    prompt: Text | Annotated[list[Text | TokenId | list[TokenId]], Meta(min_length=1)]
    max_tokens: Annotated[int, Meta(ge=0, le=2**31 - 1, description="0 only with echo")] | None = None
    echo: bool | None = None
    logprobs: Annotated[int, Meta(ge=0, le=20)] | None = None
    best_of: Annotated[int, Meta(ge=1, le=32, description="Only the value of n")] | None = None
    suffix: Annotated[str, Meta(max_length=0)] | None = None
