"""Looks at a checkpoint before anything starts: `python -m pdbus.stack.inspect CHECKPOINT`.

Its own short-lived process, so that the launcher never holds what reading a checkpoint needs. Prints one JSON object:
{"name": …, "embeds": …} for one that can be served, {"problem": …} for one that can't. Progress of a download goes to
stderr.
"""

from __future__ import annotations

import asyncio
import json
import sys
from dataclasses import dataclass
from typing import Any

from pdbus.errors import InvalidRequest, PdbusError


@dataclass(frozen=True)
class Found:
    """What a checkpoint is."""

    name: str
    """The model name that it suggests."""
    embeds: bool
    """An encoder: it embeds texts, and writes none."""


async def look_at(checkpoint: str) -> Found:
    """Raises InvalidRequest with the reason when it can't be served."""
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", __name__, checkpoint, stdin=asyncio.subprocess.DEVNULL, stdout=asyncio.subprocess.PIPE
    )
    try:
        output, _ = await process.communicate()
    except asyncio.CancelledError:
        process.kill()
        await process.wait()
        raise
    try:
        found = json.loads(output)
    except ValueError:
        raise InvalidRequest(f"{checkpoint} could not be read; the reason stands above") from None
    if "problem" in found:
        raise InvalidRequest(f"{checkpoint} can't be served: {found['problem']}")
    return Found(found["name"], found["embeds"])


def main(checkpoint: str) -> dict[str, Any]:
    from pdbus.model.checkpoint import open_checkpoint  # here: only this process pays for it
    from pdbus.model.encoder_config import EncoderConfig

    try:
        opened = open_checkpoint(checkpoint)
        return {"name": opened.name, "embeds": isinstance(opened.config, EncoderConfig)}
    except PdbusError as error:
        return {"problem": error.message}


if __name__ == "__main__":
    print(json.dumps(main(sys.argv[1])))  # noqa: T201 - its output is its result
