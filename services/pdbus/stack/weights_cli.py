"""The arguments of `pdbus weights`."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from pdbus.stack.branch_cli import add_branch
from pdbus.stack.settings import StackSettings
from pdbus.stack.table_cli import add_table

if TYPE_CHECKING:
    from pdbus.stack.attach import Target

    Subparsers = argparse._SubParsersAction[argparse.ArgumentParser]

TargetOf = Callable[[argparse.Namespace, StackSettings], "Target"]

_VERSION = "a ref, a root in hex, or its beginning"


def add_weights(
    commands: argparse._SubParsersAction[argparse.ArgumentParser], target: TargetOf
) -> list[argparse.ArgumentParser]:
    """Adds the command; returns its parsers, which lack the argument of the data folder. `target`: the stack meant."""
    kinds = commands.add_parser("weights", help="versions of the model").add_subparsers(required=True, metavar="WHAT")

    # What they need is imported when they run: `pdbus health` must not pay for it.

    def run_push(given: argparse.Namespace, settings: StackSettings) -> int:
        from rich.console import Console

        from pdbus.stack.plan import resolve_checkpoint
        from pdbus.stack.weights import Push, push

        wanted = Push(resolve_checkpoint(given.checkpoint), given.ref, given.message, given.wait)
        return push(target(given, settings), wanted, Console(highlight=False))

    def run_log(given: argparse.Namespace, settings: StackSettings) -> int:
        from pdbus.stack.weights_log import show_log

        return show_log(target(given, settings), whole=given.all)

    def run_show(given: argparse.Namespace, settings: StackSettings) -> int:
        from pdbus.stack.weights_show import show

        return show(target(given, settings), given.version)

    def run_diff(given: argparse.Namespace, settings: StackSettings) -> int:
        from pdbus.stack.weights import diff

        return diff(target(given, settings), given.old, given.new)

    def run_ref(given: argparse.Namespace, settings: StackSettings) -> int:
        from pdbus.stack.weights import move_ref

        return move_ref(target(given, settings), given.ref, None if given.delete else given.root, now=given.now)

    def run_rollback(given: argparse.Namespace, settings: StackSettings) -> int:
        from pdbus.stack.weights import rollback

        return rollback(target(given, settings), given.ref, now=given.now)

    def run_canary(given: argparse.Namespace, settings: StackSettings) -> int:
        if not given.root and not given.end:
            from pdbus.stack.canary import compare

            return compare(target(given, settings))
        from pdbus.stack.weights import canary

        return canary(target(given, settings), None if given.end else given.root, given.share)

    def run_convert(given: argparse.Namespace, settings: StackSettings) -> int:
        from pdbus.stack.weights import convert

        where, follow = target(given, settings), given.follow
        return convert(where, given.version, given.precision, given.ref, follow=follow, wait_s=given.wait)

    def run_heat(given: argparse.Namespace, settings: StackSettings) -> int:
        from pdbus.stack.weights_heat import heat

        return heat(target(given, settings), given.top, given.png)

    def run_gc(given: argparse.Namespace, settings: StackSettings) -> int:
        from pdbus.stack.weights import forget

        return forget(target(given, settings), given.versions)

    push = kinds.add_parser("push", help="commit a checkpoint: only what differs travels")
    push.set_defaults(command=run_push)
    push.add_argument(
        "checkpoint", metavar="DIR|FILE.gguf|HUB-ID", help="of the same shape as the model that is served"
    )
    push.add_argument("--ref", default="stable", help="the line that it continues (default: %(default)s)")
    push.add_argument("-m", "--message", default="", help="what is new")
    push.add_argument(
        "--wait",
        type=float,
        default=60.0,
        metavar="S",
        help="seconds to wait for the ref (default: %(default)g; 0: don't)",
    )

    log = kinds.add_parser("log", help="the change log")
    log.set_defaults(command=run_log)
    log.add_argument("--all", action="store_true", help="from the beginning, not only since the last two checkpoints")

    show = kinds.add_parser("show", help="where a version comes from")
    show.set_defaults(command=run_show)
    show.add_argument("version", metavar="VERSION", help=f"{_VERSION}, or an answer's system_fingerprint")

    diff = kinds.add_parser("diff", help="the tensors that differ between two versions")
    diff.set_defaults(command=run_diff)
    diff.add_argument("old", metavar="OLD", help=_VERSION)
    diff.add_argument("new", metavar="NEW", nargs="?", default="stable", help=f"{_VERSION} (default: %(default)s)")

    ref = kinds.add_parser("ref", help="point a ref to a version")
    ref.set_defaults(command=run_ref)
    ref.add_argument("ref", metavar="NAME", help="such as stable")
    which = ref.add_mutually_exclusive_group(required=True)
    which.add_argument("root", metavar="ROOT", nargs="?", help=_VERSION)
    which.add_argument("--delete", action="store_true", help="remove the ref, and its line with it")

    rollback = kinds.add_parser("rollback", help="point a ref to the parent of its version")
    rollback.set_defaults(command=run_rollback)
    rollback.add_argument("ref", metavar="REF", nargs="?", default="stable", help="(default: %(default)s)")

    for command in (ref, rollback):
        command.add_argument("--now", action="store_true", help="don't wait until workers have the version ready")

    canary = kinds.add_parser(
        "canary", help="give a share of the sessions another version; without one: how it does beside stable"
    )
    canary.set_defaults(command=run_canary)
    which = canary.add_mutually_exclusive_group()
    which.add_argument("root", metavar="ROOT", nargs="?", help=_VERSION)
    which.add_argument("--end", action="store_true", help="end it: everybody gets stable again")
    canary.add_argument("--share", type=_share, default=0.1, help="0 to 1 (default: %(default)s)")

    convert = kinds.add_parser("convert", help="have a version made in another precision, once, at a param-server")
    convert.set_defaults(command=run_convert)
    convert.add_argument("version", metavar="VERSION", help=_VERSION)
    convert.add_argument("--precision", required=True, choices=["fp16", "bf16", "int8", "fp8"])
    convert.add_argument("--ref", help="that names it (default: that of VERSION and the precision, as in stable-int8)")
    convert.add_argument("--follow", action="store_true", help="VERSION is a ref: each of its versions, from now on")
    convert.add_argument(
        "--wait", type=float, default=120.0, metavar="S", help="seconds to wait (default: %(default)g; 0: don't)"
    )

    heat = kinds.add_parser("heat", help="the tensors and blocks that are read and changed most")
    heat.set_defaults(command=run_heat)
    heat.add_argument("--top", type=int, default=10, metavar="N", help="(default: %(default)s)")
    heat.add_argument("--png", type=Path, metavar="FILE", help="layers by tensors, as a picture (the extra `plots`)")

    gc = kinds.add_parser("gc", help="give up versions that no ref needs, without waiting for the rollback window")
    gc.set_defaults(command=run_gc)
    gc.add_argument("versions", metavar="VERSION", nargs="*", help=f"{_VERSION} (default: all)")
    return [
        push,
        log,
        show,
        diff,
        ref,
        rollback,
        canary,
        convert,
        heat,
        gc,
        *add_branch(kinds, target),
        *add_table(kinds, target),
    ]


def _share(text: str) -> float:
    try:
        share = float(text)
    except ValueError:
        share = -1.0
    if not 0.0 <= share <= 1.0:
        raise argparse.ArgumentTypeError(f"{text!r} is not a share from 0 to 1")
    return share
