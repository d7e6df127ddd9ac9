"""What a caller has been given of a streamed answer, and what is new in the stream of a repeated request. Pure.

A repeated request has the same idempotency key and is pinned to the same version, so its text is the same; only how it
is cut into chunks may differ. What was given before is checked and left out, so that nothing comes twice.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from pdbus.errors import Corrupt

Object = dict[str, Any]

_LISTS = ("tokens", "token_logprobs", "top_logprobs", "text_offset")


@dataclass
class _Choice:
    text: str = ""
    logprobs: int = 0
    ids: list[int] = field(default_factory=list)
    finished: bool = False
    # Of the stream that is being read:
    seen: int = 0
    seen_logprobs: int = 0
    seen_ids: int = 0


@dataclass
class Resumed:
    """One answer over however many streams."""

    id: str | None = None
    fingerprint: str | None = None
    """The version that the answer comes from, once it has begun."""
    _choices: dict[int, _Choice] = field(default_factory=dict)

    def begin(self) -> None:
        """Another stream of the same request follows."""
        for choice in self._choices.values():
            choice.seen = choice.seen_logprobs = choice.seen_ids = 0

    def new(self, chunk: Object) -> Object | None:
        """The part of `chunk` that the caller doesn't have yet, or None.

        Raises Corrupt where the answer differs from what was given before."""
        if self.fingerprint not in (None, chunk["system_fingerprint"]):
            raise Corrupt("the version changed in mid-answer")
        self.fingerprint = chunk["system_fingerprint"]
        self.id = self.id or chunk["id"]
        choices = [new for choice in chunk["choices"] if (new := self._new(choice)) is not None]
        if chunk["choices"] and not choices:
            return None
        return {**chunk, "id": self.id, "choices": choices}

    def _new(self, told: Object) -> Object | None:
        known = self._choices.setdefault(told["index"], _Choice())
        chat = "delta" in told
        text = told["delta"].get("content", "") if chat else told["text"]
        before = known.text[known.seen : known.seen + len(text)]
        if not text.startswith(before):
            raise Corrupt("the repeated answer differs from what was given before")
        fresh = text[len(before) :]
        first = not (known.text or known.seen or known.logprobs or known.ids or known.finished)
        known.seen += len(text)
        known.text += fresh
        logprobs, listed = self._new_logprobs(known, told.get("logprobs"))
        ids = self._new_ids(known, told.get("token_ids") or [])
        finish = None if known.finished else told.get("finish_reason")
        known.finished |= finish is not None
        if not (fresh or listed or ids or finish or first):
            return None
        new = {**told, "logprobs": logprobs, "finish_reason": finish}
        if "token_ids" in told:
            new["token_ids"] = ids
        if chat:
            role = {"role": told["delta"]["role"]} if first and "role" in told["delta"] else {}
            new["delta"] = {**role, **({"content": fresh} if fresh or first else {})}
        else:
            new["text"] = fresh
        return new

    def _new_ids(self, known: _Choice, told: list[int]) -> list[int]:
        before = known.ids[known.seen_ids : known.seen_ids + len(told)]
        if told[: len(before)] != before:
            raise Corrupt("the repeated answer differs from what was given before")
        known.seen_ids += len(told)
        known.ids += told[len(before) :]
        return told[len(before) :]

    def _new_logprobs(self, known: _Choice, told: Object | None) -> tuple[Object | None, int]:
        if told is None:
            return None, 0
        count = len(told["content"] if "content" in told else told["tokens"])
        skip = min(max(known.logprobs - known.seen_logprobs, 0), count)
        known.seen_logprobs += count
        known.logprobs = max(known.logprobs, known.seen_logprobs)
        if "content" in told:
            return {**told, "content": told["content"][skip:]}, count - skip
        return {name: told[name][skip:] for name in _LISTS}, count - skip
