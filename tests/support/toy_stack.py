"""`pdbus up` with toys in the place of the services: `python -m tests.support.toy_stack DATA [SERVICE=TOY …]`."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console

from pdbus.errors import PdbusError
from pdbus.stack import plan, up
from pdbus.stack.folder import Folder
from pdbus.stack.inspect import Found
from pdbus.stack.plan import Options, ProcessPlan
from pdbus.stack.settings import StackSettings


@dataclass(frozen=True)
class ToyPlan(ProcessPlan):
    @property
    def command(self) -> list[str]:
        return [sys.executable, "-m", "tests.support.toy_service"]


def main(data: str, *toys: str) -> int:
    kinds = dict(toy.split("=") for toy in toys)

    def processes(
        options: Options, folder: Folder, nats_url: str, cores: int, cores_file: str | None, settings: StackSettings
    ) -> list[ProcessPlan]:
        plans = plan.processes(options, folder, nats_url, cores, cores_file, settings)
        return [
            ToyPlan(each.service, each.id, {**each.settings, "PDBUS_TOY": kinds.get(each.service, "well")})
            for each in plans
        ]

    async def look_at(_: str) -> Found:
        return Found("toy-model", embeds=False)

    up.processes, up.look_at = processes, look_at
    try:
        console = Console(highlight=False, width=200)
        return up.up(Options("toy.gguf", "", port=0), Path(data), StackSettings(), console)
    except PdbusError as error:
        sys.stderr.write(error.message)
        return 1


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
