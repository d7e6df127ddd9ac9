"""A coordinator that dies before any of its messages, or after the last: the old version, or the whole new one; and
its transaction is aborted after its deadline."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import numpy as np

from pdbus.bus.bus import Bus, connect
from pdbus.client.weights import Weights
from pdbus.errors import DeadlineExceeded
from pdbus.subjects import WEIGHTS_PREPARE, WEIGHTS_STAGE
from pdbus.weights.log_state import RETENTION_S
from tests.support.checkpoints import tiny_checkpoint
from tests.support.param_servers import ParamServers, tensors
from tests.support.until import until

EMBED, NORM = "model.embed_tokens.weight", "model.norm.weight"


class Killed(BaseException):
    """Nothing handles it, as nothing handles SIGKILL."""


class Mortal:
    """Lets so many messages of a coordinator through its bus; then it is dead, and nothing leaves it any more."""

    def __init__(self, bus: Bus, lives: int | None, answers_lost: bool) -> None:
        self.sent: list[str] = []
        self._lives, self._answers_lost = lives, answers_lost
        call, send, append = bus.call, bus.bulk.send, bus.logs.append

        async def mortal_call(to: Any, message: Any, ctx: Any) -> Any:
            if to.subject not in (WEIGHTS_STAGE, WEIGHTS_PREPARE):
                return await call(to, message, ctx)
            return await self._message(to.subject.template.rpartition(".")[2], lambda: call(to, message, ctx))

        @asynccontextmanager
        async def mortal_send(*given: Any) -> AsyncIterator[Any]:
            async with send(*given) as out:
                item = out.item
                out.item = lambda *parts: self._message("item", lambda: item(*parts))  # type: ignore[method-assign]
                yield out

        async def mortal_append(*given: Any, **named: Any) -> Any:
            return await self._message("append", lambda: append(*given, **named))

        bus.call, bus.bulk.send, bus.logs.append = mortal_call, mortal_send, mortal_append  # type: ignore[method-assign]

    async def _message(self, kind: str, send: Callable[[], Any]) -> Any:
        if self._lives is not None and len(self.sent) >= self._lives:
            raise Killed
        self.sent.append(kind)
        answer = await send()
        if self._answers_lost and len(self.sent) == self._lives:
            raise Killed
        return answer


async def test_a_coordinator_dies_at_every_step(nats_url: str, tmp_path: Path, unique: Callable[[str], str]) -> None:
    async with AsyncExitStack() as life:
        rig = ParamServers(nats_url, unique("dead"), tmp_path, life)
        checkpoint = tiny_checkpoint(tmp_path / "checkpoint", "llama")
        await asyncio.gather(rig.start("a", checkpoint), rig.start("b", checkpoint))
        watching = Weights(await life.enter_async_context(connect(nats_url, name="watching")), rig.model)
        life.push_async_callback(watching.close)
        old = (await watching.history()).heads["stable"]
        before = await tensors(rig, old)

        async def coordinate(
            line: str, value: float, lives: int | None = None, answers_lost: bool = False
        ) -> list[str]:
            timeout_s = 2.0 if lives is not None and not answers_lost else 60.0
            while True:
                async with connect(nats_url, name=line) as bus:
                    weights = Weights(bus, rig.model)
                    await weights.history()
                    mortal = Mortal(bus, lives, answers_lost)
                    try:
                        async with weights.begin(ref=line, timeout_s=timeout_s) as update:
                            await update.stage_elements(NORM, [0], [value])
                            rows = np.full((1, before[EMBED].shape[1]), value, np.float32)
                            await update.stage_rows(EMBED, [1], rows)
                            await update.commit()
                        return mortal.sent
                    except Killed:
                        return mortal.sent
                    except DeadlineExceeded:  # the machine is that slow
                        timeout_s *= 3
                    finally:
                        await weights.close()

        await watching.move_ref("dry", old.hex(), now=True)
        steps = await coordinate("dry", 1.0)
        assert set(steps) == {"stage", "item", "prepare", "append"}
        lines = [f"dies-{lives}" for lives in range(len(steps))]
        for line in (*lines, "lost"):
            await watching.move_ref(line, old.hex(), now=True)
        doomed = [coordinate(line, 10.0 + lives, lives) for lives, line in enumerate(lines)]
        await asyncio.gather(*doomed, coordinate("lost", 99.0, len(steps), answers_lost=True))

        for server in rig.running.values():
            await until(lambda server=server: not list(server._staging.transactions))
        history = await watching.history()
        assert {line for line in lines if history.heads[line] != old} == set()
        assert {end.code for end in history.ended if end.root is None} == {"deadline_exceeded"}
        new = await tensors(rig, history.heads["lost"])
        assert [new[NORM][0], new[EMBED][1, 0]] == [99.0, 99.0]
        assert {name for name in new if not np.array_equal(new[name], before[name])} == {NORM, EMBED}
        assert all(np.array_equal(array, before[name]) for name, array in (await tensors(rig, old)).items())
        for server in rig.running.values():
            await server._upkeep.reclaim()
            live = server._upkeep._reclaimer.live(history.retained(history.time_ns, RETENTION_S))
            assert live
            assert all(live & pack.spans.keys() for pack in server._store.packs)
