"""An answer told in OpenAI's objects: chunk by chunk, or whole."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence

from msgspec import UNSET, UnsetType

from pdbus.messages.router import TokenLogprob
from pdbus.router.answer import Answer
from pdbus.router.openai_reply import (
    ChatChoice,
    ChatChunk,
    ChatChunkChoice,
    ChatCompletion,
    ChatDelta,
    ChatLogprob,
    ChatLogprobs,
    ChatMessageOut,
    Completion,
    CompletionChoice,
    CompletionChunk,
    CompletionLogprobs,
    PromptDetails,
    TopLogprob,
    Usage,
)
from pdbus.router.output import Delta, ShownToken
from pdbus.router.token_bytes import TokenBytes

_LEAST_LOGPROB = -9999.0
"""JSON has no infinity."""

Chunk = ChatChunk | CompletionChunk


async def chunks(answer: Answer) -> AsyncIterator[list[Chunk]]:
    """All that is new, as chunks; at the end the usage, if it was asked for."""
    tell = Teller(answer)
    request = answer.request
    usage: Usage | UnsetType | None = None if request.include_usage else UNSET
    async for batch in answer.batches():
        if request.continuous_usage:
            usage = tell.usage()
        yield [tell.chunk(delta, usage) for delta in batch]
    if request.include_usage:
        yield [tell.last()]


async def whole(answer: Answer) -> ChatCompletion | Completion:
    """Waits for all of it."""
    deltas: list[list[Delta]] = [[] for _ in answer.outputs]
    async for batch in answer.batches():
        for delta in batch:
            deltas[delta.choice].append(delta)
    return Teller(answer).all(deltas)


class Teller:
    """Makes the objects of one answer, each chunk once and in order."""

    def __init__(self, answer: Answer) -> None:
        self._answer = answer
        self._chat = answer.request.endpoint == "chat.completions"
        self._listed = answer.request.logprobs is not None
        self._bytes = answer.version.tokenizer.bytes
        self._begun: set[int] = set()
        request = answer.request
        self._model = request.model if request.ref is None else f"{request.model}@{request.ref}"

    def chunk(self, delta: Delta, usage: Usage | UnsetType | None) -> Chunk:
        ids = self._ids(delta.ids)
        if self._chat:
            first = delta.choice not in self._begun
            self._begun.add(delta.choice)
            content = delta.text if delta.text or first else UNSET
            message = ChatDelta("assistant" if first else UNSET, content)
            return self._chat_chunk(
                [ChatChunkChoice(delta.choice, message, delta.finish, self._chat_logprobs(delta.tokens), ids)], usage
            )
        choice = CompletionChoice(delta.choice, delta.text, delta.finish, self._completion_logprobs(delta.tokens), ids)
        return self._completion_chunk([choice], usage)

    def last(self) -> Chunk:
        """Without a choice: only the usage."""
        return self._chat_chunk([], self.usage()) if self._chat else self._completion_chunk([], self.usage())

    def all(self, deltas: Sequence[Sequence[Delta]]) -> ChatCompletion | Completion:
        answer = self._answer
        texts = ["".join(delta.text for delta in parts) for parts in deltas]
        tokens = [[token for delta in parts for token in delta.tokens] for parts in deltas]
        finishes = [output.finish or "length" for output in answer.outputs]
        ids = [self._ids(output.ids) for output in answer.outputs]
        if self._chat:
            return ChatCompletion(
                id=answer.id,
                created=answer.created,
                model=self._model,
                system_fingerprint=answer.fingerprint,
                choices=[
                    ChatChoice(i, ChatMessageOut(text), finishes[i], self._chat_logprobs(tokens[i]), ids[i])
                    for i, text in enumerate(texts)
                ],
                usage=self.usage(),
            )
        return Completion(
            id=answer.id,
            created=answer.created,
            model=self._model,
            system_fingerprint=answer.fingerprint,
            choices=[
                CompletionChoice(i, text, finishes[i], self._completion_logprobs(tokens[i]), ids[i])
                for i, text in enumerate(texts)
            ],
            usage=self.usage(),
        )

    def usage(self) -> Usage:
        answer = self._answer
        prompt, completion = answer.prompt_tokens, answer.completion_tokens
        return Usage(prompt, completion, prompt + completion, PromptDetails(answer.cached_tokens))

    def _ids(self, ids: Sequence[int]) -> list[int] | UnsetType:
        return list(ids) if self._answer.request.return_token_ids else UNSET

    def _chat_chunk(self, choices: list[ChatChunkChoice], usage: Usage | UnsetType | None) -> ChatChunk:
        answer = self._answer
        return ChatChunk(
            id=answer.id,
            created=answer.created,
            model=self._model,
            system_fingerprint=answer.fingerprint,
            choices=choices,
            usage=usage,
        )

    def _completion_chunk(self, choices: list[CompletionChoice], usage: Usage | UnsetType | None) -> CompletionChunk:
        answer = self._answer
        return CompletionChunk(
            id=answer.id,
            created=answer.created,
            model=self._model,
            system_fingerprint=answer.fingerprint,
            choices=choices,
            usage=usage,
        )

    def _chat_logprobs(self, tokens: Sequence[ShownToken]) -> ChatLogprobs | None:
        if not self._listed:
            return None
        return ChatLogprobs([self._chat_logprob(token.id, token.logprob) for token in tokens if token.logprob])

    def _chat_logprob(self, token_id: int, logprob: TokenLogprob) -> ChatLogprob:
        top = [TopLogprob(*_told(self._bytes, i, value)) for i, value in logprob.top]
        return ChatLogprob(*_told(self._bytes, token_id, logprob.logprob), top)

    def _completion_logprobs(self, tokens: Sequence[ShownToken]) -> CompletionLogprobs | None:
        if not self._listed:
            return None
        return CompletionLogprobs(
            tokens=[_told(self._bytes, token.id, 0.0)[0] for token in tokens],
            token_logprobs=[_finite(token.logprob.logprob) if token.logprob else None for token in tokens],
            top_logprobs=[self._top(token.logprob) if token.logprob else None for token in tokens],
            text_offset=[token.offset for token in tokens],
        )

    def _top(self, logprob: TokenLogprob) -> dict[str, float]:
        """Two tokens may have the same text (parts of characters): the likelier one is told."""
        top: dict[str, float] = {}
        for token_id, value in logprob.top:
            top.setdefault(_told(self._bytes, token_id, value)[0], _finite(value))
        return top


def _told(tokens: TokenBytes, token_id: int, logprob: float) -> tuple[str, float, list[int]]:
    raw = tokens[token_id]
    return raw.decode("utf-8", "replace"), _finite(logprob), list(raw)


def _finite(logprob: float) -> float:
    return max(logprob, _LEAST_LOGPROB)
