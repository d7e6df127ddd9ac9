"""Batches and files for one caller at a time: made, looked at, cancelled, read and deleted."""

from __future__ import annotations

import re
from collections.abc import AsyncGenerator, AsyncIterable
from dataclasses import replace

from pdbus.canonical import digest
from pdbus.context import new_id
from pdbus.errors import InvalidRequest, NotFound
from pdbus.messages.jobs import BatchState, FileMeta, JobEndpoint
from pdbus.router.identity import Identity
from pdbus.router.jobs import lines
from pdbus.router.jobs.batch_log import BatchLog
from pdbus.router.jobs.batch_states import to_cancel
from pdbus.router.jobs.files import FileStore
from pdbus.router.jobs.openai_jobs import error_file, output_file
from pdbus.router.jobs.progress import Progress
from pdbus.router.jobs.states import LIFE_S, LONGEST_KEY
from pdbus.router.quotas import Quotas

_MADE = re.compile(r"file-(batch_[0-9a-f]{32})-(output|errors)")


class Batches:
    """Raises NotFound for whatever is not there, or another's."""

    def __init__(self, batches: BatchLog, files: FileStore, progress: Progress, quotas: Quotas) -> None:
        self._batches, self._files, self._progress, self._quotas = batches, files, progress, quotas

    async def upload(self, identity: Identity, name: str, purpose: str, content: AsyncIterable[bytes]) -> FileMeta:
        """It counts as a request of the key's quota."""
        with self._quotas.hold(identity, 0):
            return await self._files.put(identity.tenant, name, purpose, content)

    async def create(
        self, identity: Identity, endpoint: JobEndpoint, input_file: str, metadata: dict[str, str], key: str | None
    ) -> BatchState:
        """Returns once the batch can't be lost. `key`: its idempotency key. Raises Conflict for another under it."""
        if key is not None and not 0 < len(key) <= LONGEST_KEY:
            raise InvalidRequest(f"an idempotency key has 1 to {LONGEST_KEY} characters", param="Idempotency-Key")
        now = self._batches.now()
        state = BatchState(
            tenant=identity.tenant,
            id="batch_" + digest(["pdbus batch", identity.tenant, key or new_id()])[:16].hex(),
            key_id=identity.key_id,
            digest=digest(["pdbus batch body", endpoint, input_file, metadata]),
            endpoint=endpoint,
            input_file=input_file,
            created_s=now,
            expires_s=now + LIFE_S,
            since_s={"validating": now},
            metadata=metadata,
        )
        with self._quotas.hold(identity, 0):
            await self._files.meta(identity.tenant, input_file)
            return await self._batches.create(state)

    async def state(self, tenant: str, id_: str) -> BatchState:
        return (await self._batches.known(tenant, id_))[0]

    async def page(self, tenant: str, after: str | None, limit: int) -> tuple[list[BatchState], bool]:
        """The newest first, those behind `after`; and whether there are more."""
        found = await self._batches.of(tenant)
        if after is not None:
            at = next((at for at, state in enumerate(found) if state.id == after), None)
            if at is None:
                raise NotFound(f"there is no batch {after[:128]!r}", param="id")
            found = found[at + 1 :]
        return found[:limit], len(found) > limit

    async def cancel(self, tenant: str, id_: str) -> BatchState:
        """Nothing of it is begun any more, wherever; what runs is ended. Raises Conflict where it has ended itself."""
        state = await self._batches.change(tenant, id_, lambda state: to_cancel(state, self._batches.now()))
        await self._progress.tell(tenant, id_, state.status)
        return state

    async def file(self, tenant: str, id_: str) -> FileMeta:
        if made := _MADE.fullmatch(id_):
            return _there(await self.state(tenant, made[1]), made[2])
        return await self._files.meta(tenant, id_)

    async def content(self, tenant: str, id_: str) -> AsyncGenerator[bytes, None]:
        """Of a file that `file` has found."""
        if not (made := _MADE.fullmatch(id_)):
            async for piece in self._files.content(tenant, id_):
                yield piece
            return
        state = await self.state(tenant, made[1])
        async for _, entry in self._batches.entries(state):
            wanted = [line for line in entry.lines if (line.status_code == 200) == (made[2] == "output")]
            if wanted:
                yield b"".join(lines.output(state.id, line) for line in wanted)

    async def delete(self, tenant: str, id_: str) -> None:
        if not (made := _MADE.fullmatch(id_)):
            await self._files.delete(tenant, id_)
            return

        def deleted(state: BatchState) -> BatchState:
            _there(state, made[2])
            gone = "output_deleted" if made[2] == "output" else "errors_deleted"
            return replace(state, **{gone: True})  # type: ignore[arg-type]

        await self._batches.change(tenant, made[1], deleted)


def _there(state: BatchState, kind: str) -> FileMeta:
    found = output_file(state) if kind == "output" else error_file(state)
    if found is None:
        raise NotFound("there is no such file (any more, or yet)", param="id")
    return found
