"""Keeps the versions in other precisions that the change log asks for: one server makes each, another if that dies."""

from __future__ import annotations

import logging
import time

from pdbus.canonical import digest
from pdbus.context import Deadline
from pdbus.errors import PdbusError
from pdbus.param_server.commit import LogWriter
from pdbus.param_server.convert import Place, convert
from pdbus.param_server.settings import SERVICE
from pdbus.param_server.watcher import Watcher
from pdbus.weights.conversions import Due
from pdbus.weights.log_state import RETENTION_S

log = logging.getLogger(__name__)

_APPEND_S = 10.0
_AGAIN_S, _LONGEST_AGAIN_S = 10.0, 600.0
"""After a first failure, and after many: what can't be made must not fill the log."""


class Converter(Watcher):
    """Does what falls to this server of what is due."""

    def __init__(self, place: Place, writer: LogWriter) -> None:
        super().__init__(place.follower)
        self._place, self._writer = place, writer
        self._failures: dict[Due, tuple[int, float]] = {}
        """How often in a row, and when to try again (monotonic)."""
        self.detail = ""
        """What it makes just now, or why it could not."""

    async def _act(self) -> None:
        for due in self._mine():
            if due in self._place.follower.history.due_conversions:  # still, after those before it
                await self._do(due)

    def _mine(self) -> list[Due]:
        """What is due, hasn't failed lately, and falls to this server: of those that live, one for each."""
        place = self._place
        due = place.follower.history.due_conversions
        self._failures = {one: failed for one, failed in self._failures.items() if one in due}
        now = time.monotonic()
        live = {card.id for card in place.fleet.live(SERVICE) if card.model == place.model}
        servers = live.intersection(place.follower.history.members) | {place.server}

        def maker(one: Due) -> str:
            return max(servers, key=lambda server: digest([server, one.root, one.precision]))

        return [one for one in due if now >= self._failures.get(one, (0, 0.0))[1] and maker(one) == place.server]

    async def _do(self, due: Due) -> None:
        what = f"{due.precision} of version {due.root.hex()[:12]}"
        self.detail = f"making {what}"
        try:
            await self._make(due)
            self.detail = ""
        except PdbusError as error:
            self._failed(due, f"{what} could not be made: {error.message}")
        except Exception:
            log.exception("%s could not be made", what)
            self._failed(due, f"{what} could not be made: see the log")

    def _failed(self, due: Due, why: str) -> None:
        log.warning("%s", why)
        self.detail = why
        times, _ = self._failures.get(due, (0, 0.0))
        self._failures[due] = times + 1, time.monotonic() + min(_AGAIN_S * 2.0**times, _LONGEST_AGAIN_S)

    async def _make(self, due: Due) -> None:
        history = self._place.follower.history
        known = history.derived(due.root, due.precision)
        if known and due.ref and known in history.retained(time.time_ns(), RETENTION_S):
            await self._writer.lead(
                due.ref, known, f"{due.precision} of {due.root.hex()[:12]}", Deadline.after(_APPEND_S)
            )
            return
        started = time.monotonic()
        root = await convert(self._place, due)
        await self._place.follower.caught_up(Deadline.after(_APPEND_S))
        took_s = time.monotonic() - started
        log.info("%s is %s of %s, made in %.1f s", root.hex()[:12], due.precision, due.root.hex()[:12], took_s)
