"""The data folder of a local stack: its lock, its run file, its logs.

lock        held (flock) by the launcher and every process that it started, so that it is free only when all are gone
run.json    what runs there now: for `status`, `chat` and people
logs/       one log per process
nats/       JetStream's files
models/     blocks of param-servers
keys/       NATS keys of `pdbus up --secure`
keys.json   API keys, where `pdbus keys add` made some
"""

from __future__ import annotations

import fcntl
import json
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Annotated, Any, TypeAlias

import msgspec
from platformdirs import user_data_path

from pdbus.errors import Conflict
from pdbus.subject_tokens import encode_token

Pid: TypeAlias = Annotated[int, msgspec.Meta(gt=0, lt=1 << 31)]

_LINGER_S = 15.0
"""How long processes of a launcher that was killed may take to notice and end."""


@dataclass(frozen=True)
class Run:
    """What runs on a data folder."""

    launcher: Pid
    """Its process id."""
    model: str
    nats_url: str = ""
    url: str = ""
    """Of the first router's HTTP front; empty until it is known."""
    ready: bool = False
    """All processes were ready and the router served."""
    secure: bool = False
    """Its NATS server wants the keys of the folder."""
    pids: dict[str, Pid] = field(default_factory=dict)
    """By process name, the NATS server among them."""


class Folder:
    """One data folder."""

    def __init__(self, path: Path | None) -> None:
        self.path = (path or user_data_path("pdbus", appauthor=False)).expanduser().resolve()

    @property
    def logs(self) -> Path:
        return self.path / "logs"

    @property
    def nats(self) -> Path:
        return self.path / "nats"

    @property
    def nats_keys(self) -> Path:
        return self.path / "keys"

    @property
    def keys_file(self) -> Path:
        return self.path / "keys.json"

    def of_model(self, model: str) -> Path:
        """What a model's processes keep, a folder for each by its id."""
        return self.path / "models" / encode_token(model)

    @contextmanager
    def lock(self) -> Iterator[int]:
        """Holds the folder; yields the lock's file descriptor, to be inherited by what the launcher starts.

        Raises Conflict, with who holds it, when another launcher runs here. What a killed launcher left behind is
        waited for, and its run file removed."""
        self.logs.mkdir(parents=True, exist_ok=True)
        self.nats.mkdir(exist_ok=True)
        fd = os.open(self.path / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            self._take(fd)
            self._run_file.unlink(missing_ok=True)
            try:
                yield fd
            finally:
                self._run_file.unlink(missing_ok=True)
        finally:
            os.close(fd)

    def _take(self, fd: int) -> None:
        give_up = time.monotonic() + _LINGER_S
        while True:
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                return
            except BlockingIOError:
                run = self.read()
            if run is None or alive(run.launcher):
                who = f"a `pdbus up` (pid {run.launcher}) for {run.model}" if run else "another `pdbus up`"
                raise Conflict(
                    f"{who} already runs on {self.path}: stop it first, or give this one its own folder with --data"
                )
            if time.monotonic() > give_up:
                left = {name: pid for name, pid in run.pids.items() if alive(pid)}
                raise Conflict(f"processes of an earlier run on {self.path} don't end: {left}")
            time.sleep(0.1)

    @property
    def _run_file(self) -> Path:
        return self.path / "run.json"

    def write(self, run: Run) -> None:
        """Replaces the run file, whole or not at all."""
        new = self._run_file.with_suffix(".new")
        new.write_text(json.dumps(asdict(run), indent=1) + "\n")
        new.replace(self._run_file)

    def read(self) -> Run | None:
        """The run file as it stands, also that of a launcher which was killed; None where there is none."""
        try:
            found = Run(**json.loads(self._run_file.read_bytes()))
            return msgspec.convert(asdict(found), Run)
        except (FileNotFoundError, ValueError, TypeError, RecursionError):  # msgspec's errors are ValueErrors
            return None

    def running(self) -> Run | None:
        """What runs here now, as far as its launcher lives."""
        run = self.read()
        return run if run is not None and alive(run.launcher) else None


class RunFile:
    """The run file as its one writer, the launcher, keeps it."""

    def __init__(self, folder: Folder, run: Run) -> None:
        self.folder = folder
        self.run = run
        folder.write(run)

    def update(self, **changes: Any) -> None:
        self.run = replace(self.run, **changes)
        self.folder.write(self.run)

    def process(self, name: str, pid: int) -> None:
        """A process was started, for the first time or again."""
        self.update(pids={**self.run.pids, name: pid})


def alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        pass
    return True
