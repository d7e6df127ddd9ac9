"""What a key may still ask of this router: requests and tokens by the minute, choices at once.

Token buckets: each holds a minute's worth at most and fills evenly. Tokens are counted when they are known, those of
the prompt once it is read and those of the answer when it ends; so a bucket may fall below nothing, and further
requests wait until it is above. A refusal says after what time the same request would be taken.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from pdbus.errors import InvalidRequest, Overloaded
from pdbus.router.identity import Identity

_MINUTE_S = 60.0
_SMOOTHING = 0.2


@dataclass(slots=True)
class Bucket:
    """Pure: time is passed in."""

    per_minute: int
    level: float
    at_s: float

    @classmethod
    def full(cls, per_minute: int, now_s: float) -> Bucket:
        return cls(per_minute, float(per_minute), now_s)

    def fill(self, now_s: float) -> None:
        self.level = min(self.level + (now_s - self.at_s) * self.per_minute / _MINUTE_S, float(self.per_minute))
        self.at_s = now_s

    def wait_s(self, wanted: float) -> float:
        """Until it holds `wanted`; 0 when it does."""
        return max(wanted - self.level, 0.0) * _MINUTE_S / self.per_minute


@dataclass(slots=True)
class _Use:
    """Of one key."""

    requests: Bucket | None = None
    tokens: Bucket | None = None
    inflight: int = 0
    usual_s: float = field(default=1.0)
    """How long its requests took lately."""


class Spending:
    """One request's, while it is at work."""

    def __init__(self, use: _Use, now: Callable[[], float]) -> None:
        self._use, self._now = use, now

    def tokens(self, count: int) -> None:
        """They were read or written."""
        if self._use.tokens is not None:
            self._use.tokens.fill(self._now())
            self._use.tokens.level -= count


class Quotas:
    """Used from one event loop."""

    def __init__(self, now: Callable[[], float] = time.monotonic) -> None:
        self._now = now
        self._uses: dict[str, _Use] = {}
        """By key id: as many as the keys file had."""

    @property
    def inflight(self) -> int:
        """Choices at work, of all keys."""
        return sum(use.inflight for use in self._uses.values())

    @contextmanager
    def hold(self, identity: Identity, choices: int) -> Iterator[Spending]:
        """One request of `choices`. Raises Overloaded, with the time after which to try again."""
        use = self._use(identity)
        begun = self._now()
        self._check(identity, use, choices)
        if use.requests is not None:
            use.requests.level -= 1
        use.inflight += choices
        try:
            yield Spending(use, self._now)
        finally:
            use.inflight -= choices
            use.usual_s += _SMOOTHING * (self._now() - begun - use.usual_s)

    def _check(self, identity: Identity, use: _Use, choices: int) -> None:
        quota = identity.quota
        if use.requests is not None and (wait_s := use.requests.wait_s(1)):
            raise Overloaded(
                f"this key's {quota.requests_per_minute} requests a minute are used up", retry_after_s=wait_s
            )
        if use.tokens is not None and (wait_s := use.tokens.wait_s(1)):
            raise Overloaded(f"this key's {quota.tokens_per_minute} tokens a minute are used up", retry_after_s=wait_s)
        most = quota.max_inflight
        if most is not None and use.inflight and use.inflight + choices > most:
            raise Overloaded(f"this key has {use.inflight} of {most} choices at work", retry_after_s=use.usual_s)
        if most is not None and choices > most:
            raise InvalidRequest(
                f"{choices} choices are more than the {most} that this key may have at work", param="n"
            )

    def _use(self, identity: Identity) -> _Use:
        """With its buckets filled up to now, and of today's sizes: a key's limits may be changed in the file."""
        now, quota = self._now(), identity.quota
        use = self._uses.setdefault(identity.key_id, _Use())
        use.requests = _bucket(use.requests, quota.requests_per_minute, now)
        use.tokens = _bucket(use.tokens, quota.tokens_per_minute, now)
        return use


def _bucket(known: Bucket | None, per_minute: int | None, now_s: float) -> Bucket | None:
    if per_minute is None:
        return None
    if known is None or known.per_minute != per_minute:
        return Bucket.full(per_minute, now_s)
    known.fill(now_s)
    return known
