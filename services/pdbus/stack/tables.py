"""What `pdbus weights table` does."""

from __future__ import annotations

import asyncio

from pdbus.client.weights import Committed
from pdbus.stack.attach import Target
from pdbus.stack.view import print_rows, wide_console
from pdbus.stack.weights import opened
from pdbus.stack.weights_log import short
from pdbus.weights.tables import LINE, tables


def show_tables(target: Target) -> int:
    async def find() -> list[tuple[str, str, str, str]]:
        async with opened(target) as weights:
            head = (await weights.history()).head(LINE)
            found = tables(await weights.manifest(head)) if head else {}
        return [(name, str(one.rows), str(one.width), str(one.seal.seq)) for name, one in found.items()]

    rows = asyncio.run(find())
    print_rows(rows, "table", "rows", "width", "sealed up to", nothing="there are no tables")
    return 0


def drop(target: Target, table: str, message: str) -> int:
    async def throw_away() -> Committed | None:
        async with opened(target) as weights:
            return await weights.table(table).drop(message=message)

    done = asyncio.run(throw_away())
    what = f"{table} is not in version {short(done.root)} any more" if done else f"what was left of {table} is removed"
    wide_console().print(what)
    return 0
