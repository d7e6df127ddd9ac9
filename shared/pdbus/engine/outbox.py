"""Token items on their way to routers, kept until the answer's end is acknowledged. Pure; time is passed in."""

from __future__ import annotations

from dataclasses import dataclass, field

from pdbus.messages.router import TokenFrame, TokenItem
from pdbus.messages.workers import Cancel, Resend, ResendReply

KEEP_FINISHED_S = 30.0
"""How long a finished attempt's items wait for a resend where nobody acknowledges the end."""

MOST_ITEMS = 256
"""In one message: with 20 alternatives for each token they stay well below 1 MiB."""


@dataclass(slots=True)
class _Sent:
    items: list[TokenItem] = field(default_factory=list)
    finished_s: float | None = None


class Outbox:
    """Collects items, puts those of one router into one frame, and repeats them on request.

    Holds the items of every attempt from its first item until `acknowledge`, or for 30 s after its last one. So what
    waits to be sent, should the bus be slow, takes no memory beyond that.
    """

    def __init__(self, worker: str, incarnation: str) -> None:
        self._worker, self._incarnation = worker, incarnation
        self._sequence: dict[str, int] = {}  # frames so far, by router
        self._pending: dict[str, list[TokenItem]] = {}  # by router
        self._sent: dict[tuple[str, int, int], _Sent] = {}  # by (request id, choice, attempt)

    def __len__(self) -> int:
        return len(self._sent)

    def put(self, router: str, item: TokenItem, now_s: float) -> None:
        self._pending.setdefault(router, []).append(item)
        if item.finish != "cancelled":  # a cancelled attempt is never asked for again
            sent = self._sent.setdefault((item.request_id, item.choice, item.attempt), _Sent())
            sent.items.append(item)
            sent.finished_s = now_s if item.finish else None

    def close(self, request_id: str, choice: int, attempt: int, now_s: float) -> None:
        """Nothing more comes of that attempt from here."""
        sent = self._sent.get((request_id, choice, attempt))
        if sent and sent.finished_s is None:
            sent.finished_s = now_s

    def take(self) -> list[tuple[str, TokenFrame]]:
        """All that waits, as frames by router."""
        pending, self._pending = self._pending, {}
        return [(router, self._frame(router, batch)) for router, items in pending.items() for batch in _batches(items)]

    def resend(self, message: Resend) -> ResendReply:
        """What was sent of that attempt from `from_index` on. "running" also where more is left than fits a reply."""
        sent = self._sent.get((message.request_id, message.choice, message.attempt))
        if sent is None:
            return ResendReply("unknown")
        missing = [item for item in sent.items if item.finish or item.index + len(item.ids) > message.from_index]
        first, *more = _batches(missing) or [()]
        return ResendReply("running" if more or sent.finished_s is None else "finished", first)

    def acknowledge(self, message: Cancel) -> None:
        """Forgets the attempts that the message means."""
        for key in [key for key in self._sent if key[0] == message.request_id and key[2] <= message.attempt]:
            if message.choice in (None, key[1]):
                del self._sent[key]

    def expire(self, now_s: float) -> None:
        for key, sent in list(self._sent.items()):
            if sent.finished_s is not None and now_s - sent.finished_s >= KEEP_FINISHED_S:
                del self._sent[key]

    def forget_router(self, router: str) -> None:
        """It is gone: what waits for it is dropped. One of that name that comes later starts at frame 0."""
        self._sequence.pop(router, None)
        self._pending.pop(router, None)

    def _frame(self, router: str, items: tuple[TokenItem, ...]) -> TokenFrame:
        sequence = self._sequence[router] = self._sequence.get(router, -1) + 1
        return TokenFrame(self._worker, self._incarnation, sequence, items)


def _batches(items: list[TokenItem]) -> list[tuple[TokenItem, ...]]:
    """Items in order, so that each batch fits into a message: one with a prompt's log-probabilities goes alone."""
    batches: list[list[TokenItem]] = []
    for item in items:
        alone = item.prompt_logprobs is not None
        if alone or not batches or len(batches[-1]) >= MOST_ITEMS or batches[-1][-1].prompt_logprobs is not None:
            batches.append([])
        batches[-1].append(item)
    return [tuple(batch) for batch in batches]
