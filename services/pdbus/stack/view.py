"""What `pdbus up` shows: a live line for each process that is starting, a lasting one for all that happens."""

from __future__ import annotations

import time
from collections.abc import Sequence
from types import TracebackType
from typing import Self

from rich.console import Console
from rich.live import Live
from rich.markup import escape
from rich.table import Column, Table

_WIDE = 200


def wide_console() -> Console:
    """For tables: as wide as the terminal, and never cut where there is none."""
    console = Console(highlight=False)
    return console if console.is_terminal else Console(highlight=False, width=_WIDE)


def print_rows(rows: Sequence[Sequence[str]], name: str, *figures: str, nothing: str) -> None:
    """A table of names and their figures, or what is said where there are none."""
    if not rows:
        wide_console().print(nothing)
        return
    table = Table(name, *(Column(figure, justify="right") for figure in figures), box=None)
    for row in rows:
        table.add_row(*row)
    wide_console().print(table)


class View:
    """On a terminal the live lines stand below the lasting ones; elsewhere only the lasting ones are printed."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._starting: dict[str, tuple[float, str]] = {}
        self._live = Live(console=console, transient=True, refresh_per_second=8, get_renderable=self._table)

    def __enter__(self) -> Self:
        if self._console.is_terminal:
            self._live.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._live.stop()

    def starting(self, id: str, detail: str = "") -> None:
        """`id` is on its way; `detail` says what it is doing."""
        since = self._starting[id][0] if id in self._starting else time.monotonic()
        self._starting[id] = (since, detail)

    def ready(self, id: str, detail: str = "") -> None:
        since, _ = self._starting.pop(id, (time.monotonic(), ""))
        self.say(f"[green]ready[/]  {id:<16} {time.monotonic() - since:4.1f} s  [dim]{escape(detail)}[/]")

    def failed(self, id: str, what: str, lines: list[str]) -> None:
        """`id` ended unasked: how it did, and its last lines."""
        self._starting.pop(id, None)
        self.say(f"[red]ended[/]  {id:<16} {escape(what)}")
        for line in lines:
            self.say(f"        [dim]{escape(line)}[/]")

    def say(self, markup: str) -> None:
        self._console.print(markup, highlight=False, soft_wrap=True)

    def _table(self) -> Table:
        table = Table.grid(padding=(0, 2))
        now = time.monotonic()
        for id, (since, detail) in self._starting.items():
            table.add_row("[yellow]starting[/]", id, f"{now - since:4.1f} s", f"[dim]{escape(detail)}[/]")
        return table
