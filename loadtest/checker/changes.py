"""What happens to the weights while answers flow: commits, ref moves, rollbacks, canaries, and writers that die.

Each version says in its commit's message which versions its parts are of, so that whoever reads the log knows what
every root has to answer.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
import sys
import time
from collections import Counter
from dataclasses import asdict, dataclass, field

from loadtest.checker import watermark_files
from loadtest.checker.watermark import LAYERS, Marks
from pdbus.client.weights import Committed, Weights
from pdbus.errors import PdbusError
from pdbus.messages.common import Digest
from pdbus.weights.history import History

_COMMIT_S = 10.0
_STEPS = 14
"""Messages of a commit, about."""
_CHILD_S = 30.0
_SHARE = 0.3


def told(marks: Marks) -> str:
    """The message of a commit."""
    return json.dumps(asdict(marks))


def marks_of(message: str) -> Marks | None:
    """None for a message of somebody else."""
    try:
        found = json.loads(message)
        return Marks(found["embedding"], tuple(found["attention"]), tuple(found["mlp"]), found["head"])
    except (ValueError, KeyError, TypeError):
        return None


def versions(history: History) -> dict[Digest, Marks]:
    """Of every root that exists. The first one, which a param-server commits from the checkpoint, has version 0."""
    found = {}
    for root, version in history.roots.items():
        marks = marks_of(version.commit.message) if version.commit else None
        found[root] = marks or Marks()
    return found


async def commit(weights: Weights, before: Marks, after: Marks, *, timeout_s: float = _COMMIT_S) -> Committed:
    """Raises PdbusError."""
    async with weights.begin(message=told(after), author="checker", timeout_s=timeout_s) as update:
        for name, array in watermark_files.tensors(after, only=before).items():
            await update.stage(name, array)
        return await update.commit()


@dataclass
class Changes:
    """One change a second, drawn from `rng`."""

    weights: Weights
    nats_url: str
    model: str
    rng: random.Random
    done: Counter[str] = field(default_factory=Counter)
    refused: Counter[str] = field(default_factory=Counter)
    known: dict[Digest, Marks] = field(default_factory=dict)
    """Every version that was ever seen, also those that are forgotten since."""
    longest_s: float = 0.0
    """That a change took."""
    _last: int = 0

    async def run(self, every_s: float) -> None:
        """Until it is cancelled."""
        while True:
            began_s = time.monotonic()
            await self.change()
            self.longest_s = max(self.longest_s, time.monotonic() - began_s)
            await asyncio.sleep(max(0.0, every_s - (time.monotonic() - began_s)))

    async def change(self) -> None:
        kinds = ["commit", "layers", "top", "killed writer", "rollback", "canary", "ref", "forget"]
        (kind,) = self.rng.choices(kinds, [8, 5, 3, 3, 3, 3, 2, 1])
        try:
            await self._do(kind, await self.see())
            self.done[kind] += 1
        except PdbusError as error:
            self.refused[f"{kind}: {error.code}"] += 1
        with contextlib.suppress(PdbusError):
            await self.see()

    async def see(self) -> History:
        """The log as it is now; its versions are known from now on. Raises PdbusError."""
        history = await self.weights.history()
        self.known |= versions(history)
        return history

    def number(self) -> int:
        """Of the next version."""
        self._last += 1
        return self._last

    async def settle(self, root: Digest, within_s: float) -> bool:
        """Whether stable comes to name the root."""
        return await self.weights.wait_for_ref("stable", root, within_s)

    async def _do(self, kind: str, history: History) -> None:
        head = history.head("stable")
        assert head
        before = self.known[head]
        match kind:
            case "commit":
                await commit(self.weights, before, Marks.pure(self.number()))
            case "layers":
                await commit(self.weights, before, before.layers(self.number(), *self.rng.sample(range(LAYERS), 2)))
            case "top":
                await commit(self.weights, before, before.top(self.number()))
            case "killed writer":
                await self._killed(before, self.number())
            case "rollback":
                await self.weights.rollback()
            case "canary":
                root = None if "canary" in history.refs else self._some(history).hex()
                await self.weights.canary(root, _SHARE)
            case "ref":
                await self.weights.move_ref("stable", self._some(history).hex(), now=self.rng.random() < 0.3)
            case "forget":
                old = [root for root, version in history.roots.items() if version.left]
                await self.weights.forget(old[: len(old) // 4] or None)

    async def _killed(self, before: Marks, number: int) -> None:
        after = self.rng.randint(1, _STEPS)
        child = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "loadtest.checker.coordinator"),
            *(self.nats_url, self.model, str(number), told(before), str(after)),
            stderr=asyncio.subprocess.DEVNULL,
        )
        try:
            async with asyncio.timeout(_CHILD_S):
                code = await child.wait()
        except TimeoutError:
            child.kill()
            code = await child.wait()
        self.done["writer killed in mid-commit" if code < 0 else "writer too quick to be killed"] += 1

    def _some(self, history: History) -> Digest:
        """A version of late."""
        return self.rng.choice(list(history.roots)[-6:])
