"""What each tenant may have on disk: jobs that wait, results, batches and files together."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from pdbus.bus.stream_configs import JOBS_KEPT_S
from pdbus.errors import QuotaExceeded
from pdbus.router.jobs.disk_use import DiskUse
from pdbus.subjects import BATCHES, FILES, RESULTS, Log

FOLLOWED: tuple[Log[Any], ...] = (RESULTS, BATCHES, FILES)


class Shares:
    """Used from one event loop. What is stored is heard of from the logs (share_follower.py), soon and not at once: so
    what is on its way is counted by `hold`, and several routers together may let a little more in.

    What was accepted is never refused its result: a share may be overstepped by the answers that are being made."""

    def __init__(self, most_bytes: int, now: Callable[[], float] = time.time) -> None:
        """`most_bytes`: of each tenant."""
        self._most, self._now = most_bytes, now
        self.uses = {log.stream: DiskUse(JOBS_KEPT_S) for log in FOLLOWED}
        self._held: Counter[str] = Counter()

    def forget(self, stream: str) -> None:
        """It was lost, and made anew."""
        self.uses[stream] = DiskUse(JOBS_KEPT_S)

    def used(self, tenant: str) -> int:
        """Bytes, those on their way included."""
        now = self._now()
        return self._held[tenant] + sum(use.used(tenant, now) for use in self.uses.values())

    @contextmanager
    def hold(self, tenant: str, size: int) -> Iterator[None]:
        """While it is being stored. Raises QuotaExceeded."""
        self.check(tenant, size)
        self._held[tenant] += size
        try:
            yield
        finally:
            self._held[tenant] -= size
            if not self._held[tenant]:
                del self._held[tenant]

    def check(self, tenant: str, size: int) -> None:
        """Whether there is room for so much more. Raises QuotaExceeded, with the time until there is, by itself."""
        now, used = self._now(), self.used(tenant)
        lacking = used + size - self._most
        if lacking <= 0:
            return
        expiring = sorted(one for use in self.uses.values() for one in use.expiring(tenant, now))
        wait_s: float | None = None
        for after_s, freed in expiring:
            lacking -= freed
            if lacking <= 0:
                wait_s = after_s
                break
        until = f", or wait {wait_s / 3600:.1f} h until the oldest have expired" if wait_s is not None else ""
        there = f"jobs, results and files take {used >> 10} of {self._most >> 10} KiB"
        raise QuotaExceeded(
            f"{there}, and this is {-(-size // 1024)} more: delete files that are no longer needed{until}",
            retry_after_s=wait_s,
        )

    def full(self, tenant: str, size: int = 1) -> bool:
        """Whether there is no room for so much more."""
        try:
            self.check(tenant, size)
        except QuotaExceeded:
            return True
        return False
