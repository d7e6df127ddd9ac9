"""Two param-servers of one model, and a sparse table there."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack
from pathlib import Path

import pytest

from pdbus.client.weights import RowTable
from tests.support.checkpoints import tiny_checkpoint
from tests.support.tables import ROWS_OF_ALL, WIDTH, TableRig


@pytest.fixture(scope="module")
def table_checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_checkpoint(tmp_path_factory.mktemp("checkpoint"), "llama")


@pytest.fixture
async def rig(
    nats_url: str, tmp_path: Path, unique: Callable[[str], str], table_checkpoint: Path
) -> AsyncIterator[TableRig]:
    async with AsyncExitStack() as life:
        rig = TableRig(nats_url, unique("tables"), tmp_path, table_checkpoint, life)
        await rig.start("a")
        await rig.start("b")
        yield rig


@pytest.fixture
async def table(rig: TableRig) -> RowTable:
    table = await rig.table()
    await table.create(ROWS_OF_ALL, WIDTH)
    return table
