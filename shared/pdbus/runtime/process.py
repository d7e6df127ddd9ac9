"""One process from start to end: settings, logs, telemetry, the bus, the service, its presence, and the way out.

The way out, and why in this order:

    1. stop intake          nothing new may begin that would have to be finished
    2. drain, bounded       running work is finished or handed over while every connection still stands
    3. close the service    its engine and tasks end; nothing can use the bus any more
    4. flush telemetry      the spans of the last requests leave before anything that may take long
    5. drain the connection last replies and acknowledgements reach the server
"""

from __future__ import annotations

import asyncio
import faulthandler
import gc
import importlib.util
import logging
import platform
import signal
import sys
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace

from pdbus.bus.bus import connect
from pdbus.bus.presence import Presence
from pdbus.context import Deadline, RequestContext
from pdbus.errors import Conflict, PdbusError
from pdbus.messages.presence import Card, State
from pdbus.messages.workers import Drain, Draining
from pdbus.nats_access import shown
from pdbus.recording import recording
from pdbus.runtime import logs
from pdbus.runtime.collector import rare_collections
from pdbus.runtime.first import first
from pdbus.runtime.holdings import serve_holdings
from pdbus.runtime.lifeline import lifeline
from pdbus.runtime.memory import keep_freed_memory
from pdbus.runtime.service import S, Service
from pdbus.runtime.slots import slot
from pdbus.runtime.stop import Stop
from pdbus.settings import SettingsError, load
from pdbus.subjects import DRAIN
from pdbus.telemetry import Telemetry, event_loop_lag, telemetry

log = logging.getLogger(__name__)

_CONNECT_S = 120.0
_FAILED_S = 10.0
"""For closing what failed, and for all that is left of the process then."""


def run(service_class: type[Service[S]], settings_class: type[S]) -> int:
    """Runs one service until it is told to stop. Returns the exit code: 0 stopped, 1 failed, 2 wrong settings."""
    name = service_class.name
    with ExitStack() as stack:
        try:
            settings = load(settings_class)
            if settings.slots is not None:
                place = stack.enter_context(slot(settings.slots, name))
                settings = load(settings_class, over={"PDBUS_ID": place.name, "PDBUS_DATA": str(place)})
            logs.configure(name, settings.id, settings.log_level, settings.log_format)
        except (SettingsError, ValueError, OSError) as error:
            sys.stderr.write(f"pdbus {name}: {error}\n")
            return 2
        exporting = stack.enter_context(telemetry(settings, name))
        keep_freed_memory()
        # What the imports made stays for good. A full collection that goes over all of it holds the event loop up for
        # tens of ms; nothing of the service is frozen with it, so that whatever ends can still be collected.
        gc.collect()
        gc.freeze()
        runner = stack.enter_context(asyncio.Runner(loop_factory=_loop_factory()))
        return runner.run(_main(service_class, settings, exporting))


def _loop_factory() -> Callable[[], asyncio.AbstractEventLoop] | None:
    if importlib.util.find_spec("uvloop") is None:
        return None
    import uvloop

    factory: Callable[[], asyncio.AbstractEventLoop] = uvloop.new_event_loop
    return factory


async def _main(service_class: type[Service[S]], settings: S, exporting: Telemetry) -> int:
    stop = Stop()
    stop.on_signals(signal.SIGTERM, signal.SIGINT)
    with lifeline(settings.lifeline_fd, stop.launcher_lost):
        try:
            log.info("connecting to NATS at %s", shown(settings.nats_url))
            name = f"{service_class.name} {settings.id}"
            async with (
                connect(settings.nats_url, name=name, wait_s=_CONNECT_S, access=settings.nats_access) as bus,
                event_loop_lag(),
            ):
                with recording(settings.history, service_class.name, settings.id, bus.incarnation) as bus.recorder:
                    return await _live(service_class(settings, bus), exporting, stop)
        except asyncio.CancelledError:
            if not stop.requested.is_set():
                raise
            log.info("stopped while starting")
            return 0
        except SettingsError as error:  # found wrong only now that the model is known
            log.error("%s", error.message)
            return 2
        except PdbusError as error:
            log.error("%s", error.message)
            return 1
        except Exception:
            log.exception("failed")
            return 1


async def _live(service: Service[S], exporting: Telemetry, stop: Stop) -> int:
    bus, state = service.bus, _State(service)
    try:
        async with (
            Presence(bus, state.card, service.changed) as presence,
            await serve_holdings(service),
            exporting.load(service.load),
            service,
        ):
            stop.starting = False
            await bus.register_micro(service.name, service.settings.id, {"model": service.settings.model})
            async with await bus.serve(DRAIN(service=service.name, id=service.settings.id), _Drain(service, stop)):
                state.name = "ready"
                await presence.announce()
                log.info("ready")
                with rare_collections():
                    await first(stop.requested.wait(), service.failed.wait())
                state.name = "draining"
                await presence.announce()
                await _wind_down(service, stop)
                log.info("closing")
    finally:
        await exporting.flush()
    return 1 if service.failure else 0


class _State:
    """Makes the process's cards."""

    def __init__(self, service: Service[S]) -> None:
        self.name: State = "starting"
        self._service = service

    def card(self, seq: int) -> Card:
        service, bus = self._service, self._service.bus
        card = service.card(
            Card(
                service=service.name,
                id=service.settings.id,
                incarnation=bus.incarnation,
                seq=seq,
                state=self.name,
                model=service.settings.model,
                load=service.load(),
                host=platform.node(),
                bulk=bus.bulk.address,
            )
        )
        return replace(card, state="draining") if self.name == "draining" and card.state != "hung" else card


class _Drain:
    """The handler of the DRAIN subject."""

    def __init__(self, service: Service[S], stop: Stop) -> None:
        self._service, self._stop = service, stop

    async def __call__(self, message: Drain, ctx: RequestContext) -> Draining:
        if message.incarnation != self._service.bus.incarnation:
            raise Conflict("another incarnation of this process was asked")
        if not self._stop.requested.is_set():
            self._stop.request("asked to drain")
        load = self._service.load()
        return Draining(load.running, load.waiting, load.pages_used, self._service.moved)


async def _wind_down(service: Service[S], stop: Stop) -> None:
    """Steps 1 and 2. Never raises an error: closing has to follow in any case."""
    try:
        await service.stop_intake()
        if service.failure is not None:
            log.error("the service failed", exc_info=service.failure)
            # What has failed may be unable to close as well: its supervisor waits for the end, not for a clean one.
            faulthandler.dump_traceback_later(_FAILED_S, exit=True, file=sys.__stderr__ or 2)
            return
        deadline = Deadline.after(service.settings.drain_s)
        drained = False

        async def drain() -> None:
            nonlocal drained
            await service.drain(deadline)
            drained = True

        await first(drain(), stop.hurry.wait(), within_s=deadline.remaining_s)
        if not drained:
            log.warning("closing with work still running: %s", service.load())
    except Exception:
        log.exception("winding down failed")
