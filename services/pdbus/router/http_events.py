"""A streamed answer as server-sent events. What all events of a choice have in common is encoded once."""

from __future__ import annotations

from collections.abc import AsyncIterator

import msgspec
from msgspec import UNSET, UnsetType

from pdbus.router.answer import Answer
from pdbus.router.openai_reply import Usage
from pdbus.router.output import Delta
from pdbus.router.telling import Teller

_DONE = b"data: [DONE]\n\n"


async def events(answer: Answer) -> AsyncIterator[bytes]:
    """The events of all that came at once, again and again. The last ones are followed by the usage, if it was asked
    for, and by [DONE]; `answer.told` says that these are them."""
    encode = _Encoder(answer)
    async for batch in answer.batches():
        told = encode.deltas(batch)
        yield told + encode.end() if answer.told else told


class _Encoder:
    def __init__(self, answer: Answer) -> None:
        self._tell = Teller(answer)
        self._request = answer.request
        self._key = b'"content":' if answer.request.endpoint == "chat.completions" else b'"text":'
        self._usage: Usage | UnsetType | None = None if self._request.include_usage else UNSET
        self._around: dict[int, tuple[bytes, bytes]] = {}
        """By choice: what stands before and after the text in each of its events but the first and the last."""
        self._text_only = not (
            self._request.continuous_usage or self._request.return_token_ids or self._request.logprobs is not None
        )
        self._json = msgspec.json.Encoder().encode

    def deltas(self, batch: list[Delta]) -> bytes:
        return b"".join(map(self._event, batch))

    def end(self) -> bytes:
        return self._data(self._tell.last()) + _DONE if self._request.include_usage else _DONE

    def _event(self, delta: Delta) -> bytes:
        if self._text_only and delta.text and delta.finish is None:
            around = self._around.get(delta.choice)
            if around is not None:
                return around[0] + self._json(delta.text) + around[1]
            told = self._whole_event(delta)  # the first: a chat's says the role, too
            self._around[delta.choice] = self._frame(delta.choice)
            return told
        return self._whole_event(delta)

    def _whole_event(self, delta: Delta) -> bytes:
        if self._request.continuous_usage:
            self._usage = self._tell.usage()
        return self._data(self._tell.chunk(delta, self._usage))

    def _frame(self, choice: int) -> tuple[bytes, bytes]:
        text = "."
        sample = self._data(self._tell.chunk(Delta(choice, text), self._usage))
        # Quotes within a value are escaped, so only the field itself can look like this.
        before, found, after = sample.partition(self._key + self._json(text))
        assert found
        return before + self._key, after

    def _data(self, chunk: object) -> bytes:
        return b"data: %b\n\n" % self._json(chunk)
