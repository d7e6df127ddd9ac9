"""`pdbus weights`: pushing versions, moving refs, and looking at both."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from pdbus.client.weights import Update, Weights
from pdbus.client.weights.lineage import FINGERPRINT
from pdbus.client.weights.weights import CANARY, STABLE
from pdbus.errors import DeadlineExceeded
from pdbus.messages.common import Digest
from pdbus.model.checkpoint import Checkpoint, open_checkpoint
from pdbus.stack.attach import Target, attached
from pdbus.stack.view import print_rows, wide_console
from pdbus.stack.weights_log import short

_PUSH_S = 600.0
_MOVE_S = 60.0


@dataclass(frozen=True)
class Push:
    """What `pdbus weights push` was asked for."""

    checkpoint: str
    ref: str = STABLE
    message: str = ""
    wait_s: float = 60.0
    """For the ref to follow; 0: don't."""


@asynccontextmanager
async def opened(target: Target) -> AsyncIterator[Weights]:
    """The weights of the stack's model, while the scope lasts."""
    async with attached(target) as bus:
        weights = Weights(bus, target.model)
        try:
            yield weights
        finally:
            await weights.close()


def push(target: Target, wanted: Push, console: Console) -> int:
    """Commits what of a checkpoint differs from the head of the line, and waits for the ref."""
    return asyncio.run(_push(target, wanted, console))


async def _push(target: Target, wanted: Push, console: Console) -> int:
    with console.status(f"looking at {wanted.checkpoint}"):
        checkpoint = await asyncio.to_thread(open_checkpoint, wanted.checkpoint)
    message = wanted.message or f"checkpoint {checkpoint.name}"
    async with opened(target) as weights:
        async with weights.begin(ref=wanted.ref, message=message, timeout_s=_PUSH_S) as update:
            parent = update.parent
            await _stage_all(update, checkpoint, console)
            done = await update.commit()
        if done.root == parent:
            console.print(f"nothing differs from {wanted.ref} ({short(parent)})")
            return 0
        sent = f"{done.changed_blocks} blocks changed, {done.sent_bytes / 1e6:.1f} MB sent"
        console.print(f"version {done.root.hex()} on top of {short(parent)}: {sent}")
        if wanted.ref and wanted.wait_s:
            await _wait(weights, wanted, done.root, console)
    return 0


async def _stage_all(update: Update, checkpoint: Checkpoint, console: Console) -> None:
    """Files that the parent has and the checkpoint lacks stay."""
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True) as progress:
        bar = progress.add_task("tensors", total=len(checkpoint.source.shapes))
        for file, content in checkpoint.meta.items():
            await update.stage_file(file, content)
        for name, array in checkpoint.tensors():
            await update.stage(name, array)
            progress.advance(bar)


async def _wait(weights: Weights, wanted: Push, root: Digest, console: Console) -> None:
    started = time.monotonic()
    with console.status(f"waiting for {wanted.ref}"):
        try:
            moved = await weights.wait_for_ref(wanted.ref, root, wanted.wait_s)
        except DeadlineExceeded:
            console.print(
                f"{wanted.ref} has not followed within {wanted.wait_s:.0f} s: no worker of each kind is ready"
            )
            return
    if moved:
        console.print(f"{wanted.ref} → {short(root)} after {time.monotonic() - started:.1f} s")
    else:
        console.print(f"{wanted.ref} went on to another version first")


def diff(target: Target, old: str, new: str) -> int:
    async def find() -> list[tuple[str, str, str]]:
        async with opened(target) as weights:
            names = [name.removeprefix(FINGERPRINT) for name in (old, new)]
            found = await weights.diff(*names)
        return [(one.name, f"{len(one.blocks)} of {one.of}", f"{one.bytes / 1e6:.2f}") for one in found]

    rows = asyncio.run(find())
    print_rows(rows, "tensor", "blocks", "MB", nothing="no tensor differs")
    return 0


def move_ref(target: Target, name: str, root: str | None, *, now: bool) -> int:
    async def move() -> None:
        async with opened(target) as weights:
            found = await weights.move_ref(name, root, message="moved by hand", now=now)
            await _tell_move(weights, name, found)

    asyncio.run(move())
    return 0


def rollback(target: Target, name: str, *, now: bool) -> int:
    async def back() -> None:
        async with opened(target) as weights:
            await _tell_move(weights, name, await weights.rollback(name, now=now))

    asyncio.run(back())
    return 0


async def _tell_move(weights: Weights, name: str, root: Digest | None) -> None:
    """Waits for the ref, and says where it is now."""
    console = wide_console()
    if root is None:
        console.print(f"{name} → nothing")
        return
    try:
        await weights.wait_for_ref(name, root, _MOVE_S)
    except DeadlineExceeded:
        console.print(f"{name} will be {root.hex()} once workers have it ready")
    else:
        console.print(f"{name} → {root.hex()}")


def canary(target: Target, root: str | None, share: float) -> int:
    """Begins a canary, or ends it (no root)."""

    async def change() -> None:
        async with opened(target) as weights:
            await _tell_move(weights, CANARY, await weights.canary(root, share))

    asyncio.run(change())
    return 0


def convert(target: Target, name: str, precision: str, ref: str | None, *, follow: bool, wait_s: float) -> int:
    """Asks for a version in another precision, and waits until it is made and its ref has followed."""

    async def ask(console: Console) -> None:
        async with opened(target) as weights:
            asked = await weights.convert(name, precision, ref=ref, follow=follow)
            history = await weights.history()
            source = asked.root or history.head(asked.line)
            if not wait_s or source is None:
                return
            started = time.monotonic()
            with console.status(f"waiting for {precision} of {short(source)}"):
                try:
                    root = await weights.converted(source, precision, wait_s)
                except DeadlineExceeded:
                    console.print(
                        f"{precision} of {short(source)} is not made yet: `pdbus status` says what param-servers do"
                    )
                    return
            console.print(f"{precision} of {short(source)} is {root.hex()}, after {time.monotonic() - started:.1f} s")
            if asked.ref:
                await _tell_move(weights, asked.ref, root)

    asyncio.run(ask(wide_console()))
    return 0


def forget(target: Target, names: Sequence[str]) -> int:
    """Gives up versions that no ref needs: the named ones, or all."""

    async def give_up() -> tuple[Digest, ...]:
        async with opened(target) as weights:
            roots = [(await weights.resolve(name)).root for name in names]
            return await weights.forget(roots or None)

    gone = asyncio.run(give_up())
    what = ", ".join(map(short, gone)) if gone else "nothing"
    wide_console().print(f"given up: {what}")
    return 0
