"""Runs the service processes of a local stack: starts them together, tells when each is ready, ends them in order."""

from __future__ import annotations

import asyncio
import os
import urllib.error
import urllib.request
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager, suppress

from pdbus.bus.bus import Bus
from pdbus.bus.presence import Fleet
from pdbus.errors import PdbusError
from pdbus.messages.presence import Card
from pdbus.stack.child import Child, Inherited
from pdbus.stack.folder import RunFile
from pdbus.stack.logfiles import LogFile
from pdbus.stack.plan import STOP_ORDER, ProcessPlan
from pdbus.stack.view import View

_TRIES = 3
"""A process that dies this often before it was ever ready makes the start fail."""
_STOP_S = 20.0
"""From SIGTERM to SIGKILL: the services' drain (10 s) and what closing takes."""
_BOUND_LOGS_S = 10.0


class StartFailed(PdbusError):
    """A process can't be brought up; its last lines have been shown."""


@contextmanager
def lifeline_pipe() -> Iterator[int]:
    """The launcher's side of the lifeline; yields the end that children inherit. Only this process holds the other."""
    read, write = os.pipe()
    try:
        yield read
    finally:
        os.close(read)
        os.close(write)


class Launcher:
    """Owns the child processes while `running()` lasts."""

    def __init__(self, running: RunFile, plans: list[ProcessPlan], inherited: Inherited, view: View) -> None:
        self._run_file = running
        self._view = view
        self._ready: dict[str, str] = {}  # id -> incarnation that was told to be ready
        self._all_ready = asyncio.Event()
        self._failed = asyncio.Event()
        self._failure = ""
        self._children = {
            plan.id: Child(
                plan, LogFile(running.folder.logs / f"{plan.id}.log"), inherited, self._on_start, self._on_death
            )
            for plan in plans
        }

    @asynccontextmanager
    async def running(self, hurry: asyncio.Event) -> AsyncIterator[None]:
        """Starts all processes at once and keeps them running; on leaving, ends them in STOP_ORDER."""
        tasks = [asyncio.create_task(child.keep_running()) for child in self._children.values()]
        bounding = asyncio.create_task(self._bound_logs())
        try:
            yield
        finally:
            await self._stop(hurry)
            bounding.cancel()
            await asyncio.gather(*tasks, bounding, return_exceptions=True)

    @asynccontextmanager
    async def watching(self, bus: Bus) -> AsyncIterator[None]:
        """Shows who becomes ready, at the start and after each restart, from presence cards."""
        async with Fleet(bus) as fleet:

            def look() -> None:
                for child in self._children.values():
                    if (card := fleet.card(child.plan.id)) is not None:
                        self._show(child, card)
                if self._ready.keys() >= self._children.keys():
                    self._all_ready.set()

            fleet.on_change(look)
            look()
            yield

    async def started(self) -> None:
        """Returns when every process has been ready and the first router answers. Raises StartFailed."""
        await self._all_ready.wait()
        while not await asyncio.to_thread(_serves, self._run_file.run.url):  # noqa: ASYNC110 - another process's state
            await asyncio.sleep(0.1)
        self._run_file.update(ready=True)

    async def failed(self) -> None:
        """Returns never; raises StartFailed when a process can't be brought up."""
        await self._failed.wait()
        raise StartFailed(self._failure)

    def _show(self, child: Child, card: Card) -> None:
        id = child.plan.id
        if self._ready.get(id) == card.incarnation or child.pid is None:
            return
        if card.state == "starting":
            self._view.starting(id, card.detail)
        elif card.state == "ready":
            self._ready[id] = card.incarnation
            self._view.ready(id, card.url or card.detail)
            if card.url:
                child.settings["PDBUS_HTTP_PORT"] = card.url.rsplit(":", 1)[1].rstrip("/")
                if id == "router-1":
                    self._run_file.update(url=card.url)

    def _on_start(self, child: Child) -> None:
        self._view.starting(child.plan.id)
        if child.pid is not None:
            self._run_file.process(child.plan.id, child.pid)

    def _on_death(self, child: Child, what: str, again_in_s: float | None) -> None:
        id = child.plan.id
        never_ready = id not in self._ready
        give_up = again_in_s is None or (never_ready and child.deaths >= _TRIES)
        then = "" if give_up else f"; starting it again in {again_in_s:.1f} s"
        self._view.failed(id, f"{what}{then} (log: {child.log.path})", child.last_lines())
        if give_up and not self._failed.is_set():
            self._failure = f"{id} does not start: {what}"
            self._failed.set()

    async def _stop(self, hurry: asyncio.Event) -> None:
        for services in STOP_ORDER:
            group = [child for child in self._children.values() if child.plan.service in services]
            ended = await asyncio.gather(*(child.stop(_STOP_S, hurry) for child in group))
            for child, by_itself in zip(group, ended, strict=True):
                if not by_itself:
                    self._view.say(f"[red]killed[/] {child.plan.id}: it did not end in time")

    async def _bound_logs(self) -> None:
        while True:
            await asyncio.sleep(_BOUND_LOGS_S)
            for child in self._children.values():
                child.log.bound()


def _serves(url: str) -> bool:
    """Whether a router takes requests."""
    with suppress(OSError, urllib.error.URLError), urllib.request.urlopen(f"{url}/readyz", timeout=2) as answer:  # noqa: S310
        return bool(answer.status == 200)
    return False
