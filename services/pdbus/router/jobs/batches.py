"""Batches and files for one caller at a time: made, looked at, cancelled, read and deleted."""

from __future__ import annotations

import re
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, replace

from pdbus.canonical import digest
from pdbus.context import new_id
from pdbus.errors import Conflict, InvalidRequest, NotFound
from pdbus.messages.jobs import JOB_PRIORITY, BatchLine, BatchState, FileMeta, JobEndpoint
from pdbus.router.identity import Identity
from pdbus.router.jobs import lines
from pdbus.router.jobs.batch_log import BatchLog
from pdbus.router.jobs.batch_states import to_cancel
from pdbus.router.jobs.files import FileStore, Upload
from pdbus.router.jobs.openai_jobs import error_file, output_file
from pdbus.router.jobs.progress import Progress
from pdbus.router.jobs.shares import Shares
from pdbus.router.jobs.states import LIFE_S, LONGEST_KEY
from pdbus.router.quotas import Quotas

_MADE = re.compile(r"file-(batch_[0-9a-f]{32})-(output|errors)")
_MOST_LEFT_BYTES = 512 << 10


@dataclass(frozen=True, slots=True)
class FilesWanted:
    """One page of a list of files."""

    limit: int
    purpose: str | None = None
    after: str | None = None
    newest_first: bool = True


@dataclass(frozen=True, slots=True)
class NewBatch:
    """As it is asked for."""

    endpoint: JobEndpoint
    input_file: str
    metadata: dict[str, str]
    priority: int = JOB_PRIORITY
    output_kept_s: int | None = None
    """None: for as long as there is no other word."""


class Batches:
    """Raises NotFound for whatever is not there, or another's."""

    def __init__(self, batches: BatchLog, files: FileStore, progress: Progress, quotas: Quotas, shares: Shares) -> None:
        self._batches, self._files, self._progress, self._quotas = batches, files, progress, quotas
        self._shares = shares

    @asynccontextmanager
    async def upload(self, identity: Identity, name: str, size: int) -> AsyncIterator[Upload]:
        """It counts as a request of the key's quota. `size`: what is to come, as far as that is known."""
        with self._quotas.hold(identity, 0):
            await self._make_room(identity.tenant, size)
            async with self._files.upload(identity.tenant, name) as upload:
                yield upload

    async def _make_room(self, tenant: str, size: int) -> None:
        if self._shares.full(tenant, size):
            await self._files.of(tenant)  # what has expired goes, and what was never finished
        self._shares.check(tenant, size)

    async def create(self, identity: Identity, new: NewBatch, key: str | None) -> BatchState:
        """Returns once the batch can't be lost. `key`: its idempotency key. Raises Conflict for another under it,
        QuotaExceeded."""
        if key is not None and not 0 < len(key) <= LONGEST_KEY:
            raise InvalidRequest(f"an idempotency key has 1 to {LONGEST_KEY} characters", param="Idempotency-Key")
        now = self._batches.now()
        state = BatchState(
            tenant=identity.tenant,
            id="batch_" + digest(["pdbus batch", identity.tenant, key or new_id()])[:16].hex(),
            key_id=identity.key_id,
            digest=digest(["pdbus batch body", new.endpoint, new.input_file, new.metadata, new.output_kept_s]),
            endpoint=new.endpoint,
            input_file=new.input_file,
            created_s=now,
            expires_s=now + LIFE_S,
            since_s={"validating": now},
            metadata=new.metadata,
            priority=min(new.priority, identity.priority_most),
        )
        if new.output_kept_s is not None:
            state = replace(state, output_kept_s=float(new.output_kept_s))
        with self._quotas.hold(identity, 0):
            input_ = await self._files.meta(identity.tenant, new.input_file)
            return await self._batches.create(replace(state, expires_s=min(state.expires_s, input_.expires_s)))

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

    async def files(self, tenant: str, wanted: FilesWanted) -> tuple[list[FileMeta], bool]:
        """Those behind `after`, and whether there are more. `after` may be deleted by now."""
        found: list[FileMeta] = []
        if wanted.purpose in (None, "batch"):
            found += await self._files.of(tenant)
        if wanted.purpose in (None, "batch_output"):
            states = await self._batches.of(tenant)
            made = [made for state in states for made in (output_file(state), error_file(state))]
            found += [file for file in made if file is not None and self._batches.now() < file.expires_s]
        found.sort(key=_made_at, reverse=wanted.newest_first)
        if wanted.after is not None:
            at = _made_at(await self._ever(tenant, wanted.after))
            found = [file for file in found if (_made_at(file) < at if wanted.newest_first else _made_at(file) > at)]
        return found[: wanted.limit], len(found) > wanted.limit

    async def _ever(self, tenant: str, id_: str) -> FileMeta:
        if made := _MADE.fullmatch(id_):
            state = replace(await self.state(tenant, made[1]), output_deleted=False, errors_deleted=False)
            return _there(state, made[2], 0.0)
        if (known := await self._files.ever(tenant, id_)) is None:
            raise NotFound(f"there is no file {id_[:128]!r}", param="id")
        return known[0]

    async def file(self, tenant: str, id_: str) -> FileMeta:
        if made := _MADE.fullmatch(id_):
            return _there(await self.state(tenant, made[1]), made[2], self._batches.now())
        return await self._files.meta(tenant, id_)

    async def content(self, tenant: str, id_: str) -> AsyncGenerator[bytes, None]:
        """Of a file that `file` has found."""
        if not (made := _MADE.fullmatch(id_)):
            async for piece in self._files.content(tenant, id_):
                yield piece
            return
        state, told = await self.state(tenant, made[1]), set[int]()
        async for _, entry in self._batches.entries(state):
            # The other file may be deleted meanwhile, and what is left be stored once more (`_free`).
            new = (line for line in entry.lines if line.number not in told)
            wanted = [line for line in new if (line.status_code == 200) == (made[2] == "output")]
            told.update(line.number for line in wanted)
            if wanted:
                yield b"".join(lines.output(state.id, line) for line in wanted)

    async def delete(self, tenant: str, id_: str) -> None:
        if not (made := _MADE.fullmatch(id_)):
            await self._files.delete(tenant, id_)
            return

        def deleted(state: BatchState) -> BatchState:
            _there(state, made[2], self._batches.now())
            gone = "output_deleted" if made[2] == "output" else "errors_deleted"
            return replace(state, **{gone: True})  # type: ignore[arg-type]

        await self._free(await self._batches.change(tenant, made[1], deleted))

    async def _free(self, state: BatchState) -> None:
        """Takes off the disk what nobody can read any more, where what is left fits one entry."""
        read = {True: output_file(state) is not None, False: error_file(state) is not None}
        left: list[BatchLine] = []
        size = last = 0
        async for seq, entry in self._batches.entries(state):
            last, state = seq, entry.state
            wanted = [line for line in entry.lines if read[line.status_code == 200]]
            left += wanted
            size += sum(len(line.data) + len(line.custom_id) for line in wanted)
            if size > _MOST_LEFT_BYTES:
                return
        with suppress(Conflict):  # somebody else deletes the other one
            await self._batches.append(state, last, left, replaces=True)


def _made_at(file: FileMeta) -> tuple[float, str]:
    return file.created_s, file.id


def _there(state: BatchState, kind: str, now_s: float) -> FileMeta:
    found = output_file(state) if kind == "output" else error_file(state)
    if found is None or now_s >= found.expires_s:
        raise NotFound("there is no such file (any more, or yet)", param="id")
    return found
