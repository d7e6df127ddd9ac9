"""A writer that is killed in the middle of its commit.

`python -m loadtest.checker.coordinator NATS_URL MODEL VERSION FROM AFTER`: commits, on the line stable, the pure
VERSION of the watermark model, whose weights now are those of FROM (marks as JSON), and kills itself with signal 9 when
it is about to send its message number AFTER. Which message that is, over all numbers, is every step of a commit.
"""

from __future__ import annotations

import asyncio
import os
import signal
import sys

from loadtest.checker.changes import commit, marks_of
from loadtest.checker.watermark import Marks
from pdbus.bus.bus import connect
from pdbus.client.weights import Weights

_TIMEOUT_S = 4.0


async def _main(nats_url: str, model: str, version: int, before: str, after: int) -> None:
    async with connect(nats_url, name="coordinator") as bus:
        weights = Weights(bus, model)
        await weights.history()
        send, left = bus.transport.send, after

        def counted(*parts: object, **options: object) -> None:
            nonlocal left
            left -= 1
            if left <= 0:
                os.kill(os.getpid(), signal.SIGKILL)
            send(*parts, **options)  # type: ignore[arg-type]

        bus.transport.send = counted  # type: ignore[method-assign]
        base = marks_of(before)
        assert base
        try:
            await commit(weights, base, Marks.pure(version), timeout_s=_TIMEOUT_S)
        finally:
            await weights.close()


if __name__ == "__main__":
    asyncio.run(_main(sys.argv[1], sys.argv[2], int(sys.argv[3]), sys.argv[4], int(sys.argv[5])))
