"""The `pdbus` command."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from pdbus.errors import PdbusError
from pdbus.settings import load
from pdbus.stack.keys_cli import add_keys
from pdbus.stack.plan import FEW_CORES
from pdbus.stack.settings import StackSettings
from pdbus.stack.weights_cli import add_weights

if TYPE_CHECKING:
    from pdbus.stack.attach import Target

_DEFAULT_URL = "http://127.0.0.1:8000"
"""Where `pdbus chat` looks when nothing runs on the data folder: containers publish it there."""

Command = Callable[[argparse.Namespace, StackSettings], int]


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs one command. Returns its exit code: 0 done, 1 failed, 2 wrong usage."""
    given = parser().parse_args(arguments)
    command: Command = given.command
    try:
        return command(given, load(StackSettings))
    except PdbusError as error:
        sys.stderr.write(f"pdbus: {error.message}\n")
        return 1
    except KeyboardInterrupt:
        return 130


def parser() -> argparse.ArgumentParser:
    top = argparse.ArgumentParser(prog="pdbus", description="LLM serving from small services on NATS")
    commands = top.add_subparsers(required=True, metavar="COMMAND")

    up = commands.add_parser("up", help="run everything on this machine")
    up.set_defaults(command=_up)
    up.add_argument(
        "--model", metavar="DIR|FILE.gguf|HUB-ID", help="checkpoint to serve (default: SmolLM2-135M-Instruct)"
    )
    up.add_argument("--name", help="the model's name in requests (default: what the checkpoint suggests)")
    up.add_argument("--host", default="127.0.0.1", help="address of the HTTP front (default: %(default)s)")
    up.add_argument("--port", type=_port, default=8000, help="its port; 0: a free one (default: %(default)s)")
    up.add_argument(
        "--precision",
        choices=["auto", "fp32", "int8", "int4"],
        default="",
        help="of the weights (default, auto: int8, or fp32 where torch computes); made by each worker as it loads them",
    )
    up.add_argument(
        "--kv-dtype",
        choices=["auto", "fp32", "fp16", "int8"],
        default="",
        help="of the KV cache (default, auto: int8, or fp32 beside weights in fp32)",
    )
    up.add_argument(
        "--colocated", action="store_true", help="decode workers read all prompts themselves: no prefill workers"
    )
    up.add_argument(
        "--prefill",
        type=_count,
        metavar="N",
        help=f"processes (default: 1; on up to {FEW_CORES} cores --colocated)",
    )
    up.add_argument(
        "--secure", action="store_true", help="NATS lets in only who has a key (DATA/keys), each for what it needs"
    )
    for flag in ("decode", "param-servers", "cache-nodes", "invalidators", "routers"):
        kind = _count_or_none if flag == "cache-nodes" else _count
        up.add_argument(f"--{flag}", type=kind, default=1, metavar="N", help="processes (default: %(default)s)")
    _data(up)

    chat = commands.add_parser("chat", help="talk to a running stack", epilog="An API key is taken from PDBUS_API_KEY.")
    chat.set_defaults(command=_chat)
    chat.add_argument("prompt", nargs="?", help="ask this and leave; without it: a conversation")
    chat.add_argument("--url", help="of an OpenAI-compatible server (default: the stack of the data folder)")
    chat.add_argument("--temperature", type=float, default=0.2, help="small models wander at 1 (default: %(default)s)")
    chat.add_argument("--max-tokens", type=_tokens, default=512, help="of one answer (default: %(default)s)")
    _data(chat)

    status = commands.add_parser("status", help="services, versions and load")
    status.set_defaults(command=_status)
    status.add_argument("--json", action="store_true", help="for programs")
    status.add_argument("--holdings", action="store_true", help="what each process holds for work in hand, and keeps")
    _data(status)

    drain = commands.add_parser("drain", help="take a process out of service: what it is doing moves or is finished")
    drain.set_defaults(command=_drain)
    drain.add_argument("id", help="as `pdbus status` has it, such as decode-1")
    _data(drain)

    for command in add_weights(commands, _target):
        _data(command)

    for command in add_keys(commands):
        _data(command)

    health = commands.add_parser("health", help="exit code 0 if a process on NATS_URL is ready (for containers)")
    health.set_defaults(command=_health)
    health.add_argument("--service", required=True, help="its kind, such as decode")
    health.add_argument("--id", help="its id (default: any process of this host)")
    return top


def _data(command: argparse.ArgumentParser) -> None:
    command.add_argument("--data", type=Path, metavar="DIR", help="data folder (default: the user's)")


def _count_or_none(text: str) -> int:
    return 0 if text == "0" else _count(text)


def _count(text: str) -> int:
    if not text.isdigit() or not 1 <= int(text) <= 64:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number from 1 to 64")
    return int(text)


def _tokens(text: str) -> int:
    if not text.isdigit() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of tokens")
    return int(text)


def _port(text: str) -> int:
    if not text.isdigit() or int(text) > 65535:
        raise argparse.ArgumentTypeError(f"{text!r} is not a port number")
    return int(text)


# Each command imports what it needs: `pdbus health` must not pay for the launcher.


def _up(given: argparse.Namespace, settings: StackSettings) -> int:
    from rich.console import Console

    from pdbus.model.default import default_checkpoint
    from pdbus.runtime.cores import usable_cores
    from pdbus.stack.plan import Options, layout, resolve_checkpoint
    from pdbus.stack.up import up

    prefill, colocated = layout(given.prefill, given.colocated, usable_cores())
    options = Options(
        checkpoint=resolve_checkpoint(given.model) if given.model else str(default_checkpoint()),
        model=given.name,
        host=given.host,
        port=given.port,
        precision=given.precision,
        kv_dtype=given.kv_dtype,
        routers=given.routers,
        param_servers=given.param_servers,
        cache_nodes=given.cache_nodes,
        invalidators=given.invalidators,
        prefill=prefill,
        decode=given.decode,
        colocated=colocated,
        secure=given.secure,
    )
    return up(options, given.data or settings.data, settings, Console())


def _chat(given: argparse.Namespace, settings: StackSettings) -> int:
    from rich.console import Console

    from pdbus.stack.chat import Chat, connect, converse
    from pdbus.stack.folder import Folder

    folder = Folder(given.data or settings.data)
    run = folder.running()
    url = given.url or (run.url if run else "") or _DEFAULT_URL
    chat = Chat(url, given.temperature, given.max_tokens, settings.api_key)
    console = Console(highlight=False)
    nothing = "" if given.url or run else f"nothing runs on {folder.path}: start it with `pdbus up`, or name a --url"
    connect(chat, console, nothing)
    return converse(chat, given.prompt, console)


def _target(given: argparse.Namespace, settings: StackSettings) -> Target:
    from pdbus.stack.attach import find

    return find(given.data or settings.data, settings)


def _status(given: argparse.Namespace, settings: StackSettings) -> int:
    from pdbus.stack.status import status, status_holdings

    return (status_holdings if given.holdings else status)(_target(given, settings), json_wanted=given.json)


def _drain(given: argparse.Namespace, settings: StackSettings) -> int:
    from rich.console import Console

    from pdbus.stack.drain import drain

    return drain(_target(given, settings), given.id, Console(highlight=False))


def _health(given: argparse.Namespace, settings: StackSettings) -> int:
    from pdbus.stack.health import health

    url = settings.nats_url or "nats://127.0.0.1:4222"
    return health(url, settings.nats_access, settings.model, given.service, given.id)
