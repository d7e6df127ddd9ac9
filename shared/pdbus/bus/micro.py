"""The NATS services API (ADR-32), so that the stock `nats micro` command lists each process and its statistics."""

from __future__ import annotations

import importlib.metadata
import json
import logging
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any

from pdbus.bus.serving import Registration
from pdbus.bus.transport import Raw, Subscription, Transport
from pdbus.errors import PdbusError

log = logging.getLogger(__name__)


@dataclass(slots=True)
class Micro:
    """Answers `$SRV.PING|INFO|STATS` for one process. `endpoints`: what it serves at the moment of the question."""

    service: str
    id: str
    metadata: Mapping[str, str]
    endpoints: Callable[[], Iterable[Registration[Any, Any]]]
    version: str = field(default_factory=lambda: importlib.metadata.version("pdbus"))
    started: datetime = field(default_factory=lambda: datetime.now(UTC))
    _subscriptions: list[Subscription] = field(default_factory=list)

    async def start(self, transport: Transport) -> None:
        for verb, describe in (("PING", dict), ("INFO", self._info), ("STATS", self._stats)):
            for scope in (verb, f"{verb}.{self.service}", f"{verb}.{self.service}.{self.id}"):
                answer = self._answer(transport, verb, describe)
                self._subscriptions.append(await transport.subscribe(f"$SRV.{scope}", answer))

    async def close(self) -> None:
        for subscription in self._subscriptions:
            await subscription.close()

    def _answer(self, transport: Transport, verb: str, describe: Callable[[], dict[str, Any]]) -> Callable[[Raw], None]:
        def answer(raw: Raw) -> None:
            if not raw.reply:
                return
            identity = {
                "type": f"io.nats.micro.v1.{verb.lower()}_response",
                "name": self.service,
                "id": self.id,
                "version": self.version,
                "metadata": dict(self.metadata),
            }
            try:
                transport.send(raw.reply, json.dumps(identity | describe()).encode())
            except PdbusError as error:
                log.warning("could not answer %s: %s", raw.subject, error.message)

        return answer

    def _info(self) -> dict[str, Any]:
        endpoints = [
            {
                "name": _endpoint_name(it),
                "subject": it.to.name,
                "queue_group": it.to.subject.queue or "",
                "metadata": {},
            }
            for it in self.endpoints()
        ]
        return {"description": f"pdbus {self.service}", "endpoints": endpoints}

    def _stats(self) -> dict[str, Any]:
        endpoints = [
            {
                "name": _endpoint_name(it),
                "subject": it.to.name,
                "queue_group": it.to.subject.queue or "",
                "num_requests": it.requests,
                "num_errors": it.errors,
                "last_error": "",
                "processing_time": int(it.busy_s * 1e9),
                "average_processing_time": int(it.busy_s * 1e9 / max(it.requests, 1)),
            }
            for it in self.endpoints()
        ]
        return {"started": self.started.isoformat().replace("+00:00", "Z"), "endpoints": endpoints}


def _endpoint_name(registration: Registration[Any, Any]) -> str:
    """The fixed parts of the subject: `pd.v1.decode.{worker}.run` is decode-run."""
    return "-".join(part for part in registration.to.subject.template.split(".")[2:] if not part.startswith("{"))
