"""`pdbus up`: everything on one machine."""

from __future__ import annotations

import asyncio
import json
import os
import shlex
import shutil
import signal
import socket
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path

from rich.console import Console
from rich.markup import escape

from pdbus.bus.bus import Bus, connect
from pdbus.errors import Conflict, InvalidRequest
from pdbus.native.cores import ledger
from pdbus.nats_access import NatsAccess
from pdbus.runtime.cores import usable_cores
from pdbus.runtime.first import first
from pdbus.runtime.stop import Stop
from pdbus.stack.child import Inherited
from pdbus.stack.folder import Folder, Run, RunFile
from pdbus.stack.inspect import look_at
from pdbus.stack.launcher import Launcher, lifeline_pipe
from pdbus.stack.membership import left_behind, retire
from pdbus.stack.nats_accounts import seed_path, write_accounts
from pdbus.stack.nats_child import own_nats
from pdbus.stack.plan import Options, keys_file, processes
from pdbus.stack.settings import StackSettings
from pdbus.stack.view import View

_CONNECT_S = 10.0


def check_port(host: str, port: int) -> None:
    """Raises Conflict if nothing could listen there now."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError as error:
            raise Conflict(
                f"can't listen on {host}:{port} ({error.strerror}): choose another --port, or 0 for a free one"
            ) from None


def up(options: Options, data: Path | None, settings: StackSettings, console: Console) -> int:
    """Runs the stack until it is told to stop. Returns the exit code. Raises a PdbusError, with the reason, when it
    can't start; nothing is left running then."""
    if options.secure and settings.nats_url:
        raise InvalidRequest("--secure is of the launcher's own NATS server: leave NATS_URL unset, or --secure out")
    folder = Folder(data)
    with folder.lock() as lock, lifeline_pipe() as lifeline, ledger(usable_cores()) as cores:
        check_port(options.host, options.port)
        return asyncio.run(_up(options, folder, settings, Inherited(lifeline, lock, cores), console))


async def _up(options: Options, folder: Folder, settings: StackSettings, inherited: Inherited, console: Console) -> int:
    stop = Stop()
    stop.on_signals(signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    try:
        with console.status(f"looking at {escape(options.checkpoint)}"):
            found = await look_at(options.checkpoint)
        options = replace(options, model=options.model or found.name, embeds=found.embeds)
        with View(console) as view:
            run_file = RunFile(folder, Run(os.getpid(), options.model, secure=options.secure))
            async with _nats(run_file, settings, inherited, view) as url:
                run_file.update(nats_url=url)
                await _serve(options, run_file, url, settings, inherited, view, stop)
    except asyncio.CancelledError:
        if not stop.requested.is_set():
            raise
    console.print("all stopped")
    return 0


@asynccontextmanager
async def _nats(run_file: RunFile, settings: StackSettings, inherited: Inherited, view: View) -> AsyncIterator[str]:
    """The URL of the server that the settings name, or of one of our own."""
    if settings.nats_url:
        yield settings.nats_url
        return
    view.starting("nats")

    def on_start(pid: int) -> None:
        run_file.process("nats", pid)
        view.ready("nats")

    def on_death(what: str) -> None:
        view.failed("nats", f"{what}; starting it again", [])

    folder, keys = run_file.folder, None
    if run_file.run.secure:
        keys = folder.nats_keys
        write_accounts(keys)
    async with own_nats(folder.nats, settings.nats_server_bin, inherited, on_start, on_death, keys) as url:
        yield url


def _access(run_file: RunFile, settings: StackSettings) -> NatsAccess:
    if not run_file.run.secure:
        return settings.nats_access
    return NatsAccess(seed=seed_path(run_file.folder.nats_keys, "operator"))


async def _serve(
    options: Options,
    run_file: RunFile,
    nats_url: str,
    settings: StackSettings,
    inherited: Inherited,
    view: View,
    stop: Stop,
) -> None:
    plans = processes(options, run_file.folder, nats_url, usable_cores(), inherited.cores_file, settings)
    launcher = Launcher(run_file, plans, inherited, view)
    access = _access(run_file, settings)
    async with (
        launcher.running(stop.hurry),
        connect(nats_url, name="pdbus up", wait_s=_CONNECT_S, access=access) as bus,
        launcher.watching(bus),
    ):
        gone = left_behind(run_file.folder.of_model(options.model), {plan.id for plan in plans})
        await first(_start(bus, options.model, gone, launcher), launcher.failed())
        stop.starting = False
        _greet(view, run_file, options, asks_keys=keys_file(run_file.folder, settings) is not None)
        await first(stop.requested.wait(), launcher.failed())
        view.say("stopping (once more to stop at once)")


async def _start(bus: Bus, model: str, gone: set[str], launcher: Launcher) -> None:
    if gone:
        await retire(bus, model, gone)
    await launcher.started()


def _command(folder: Folder, command: str) -> str:
    """How a user types a command of this installation for this folder, from the current one."""
    here = Path(sys.executable).with_name("pdbus")
    found = shutil.which("pdbus")
    if found and Path(found).resolve() == here.resolve():
        words = ["pdbus", command]
    else:
        words = [str(here.relative_to(Path.cwd()) if here.is_relative_to(Path.cwd()) else here), command]
    return shlex.join(words if folder.path == Folder(None).path else [*words, "--data", str(folder.path)])


def example_call(url: str, model: str, *, embeds: bool, asks_keys: bool) -> str:
    """A request, as a user types it into a shell."""
    endpoint = "embeddings" if embeds else "chat/completions"
    asked = {"input": "Say hello."} if embeds else {"messages": [{"role": "user", "content": "Say hello."}]}
    key = ' -H "authorization: Bearer $PDBUS_API_KEY"' if asks_keys else ""
    body = shlex.quote(json.dumps({"model": model, **asked}))
    return f"curl {url}/v1/{endpoint}{key} -H 'content-type: application/json' -d {body}"


def _greet(view: View, run_file: RunFile, options: Options, *, asks_keys: bool) -> None:
    embeds, url, model = options.embeds, run_file.run.url, run_file.run.model
    curl = escape(example_call(url, model, embeds=embeds, asks_keys=asks_keys))
    view.say(f"\n[bold]{escape(model)}[/] is served at [bold]{url}[/] (logs: {escape(str(run_file.folder.logs))})")
    if options.colocated and not embeds:
        view.say("prompts are read by the decode workers (colocated); --prefill N gives them workers of their own")
    if embeds:
        view.say(f"try:    {curl}")
    else:
        view.say(f"try:    {escape(_command(run_file.folder, 'chat'))}")
        view.say(f"or:     {curl}")
    view.say("stop:   Ctrl-C\n")
