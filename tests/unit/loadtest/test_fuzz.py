"""The fuzzers: the same input for the same number, every fault counted, and a few hundred inputs of each kind."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from random import Random
from typing import Any

import pytest

from loadtest.fuzz import seeds
from loadtest.fuzz.board import Board, shared_board
from loadtest.fuzz.command import arguments, render
from loadtest.fuzz.drive import drive, once_each
from loadtest.fuzz.gguf_seeds import FORMATS, gguf
from loadtest.fuzz.kinds import KINDS
from loadtest.fuzz.noise import Messages, damaged, spoiled, tree
from loadtest.fuzz.packing import pack
from loadtest.fuzz.supervise import Result
from loadtest.fuzz.use import use
from pdbus.bus.codec import decode
from pdbus.messages.decode import DecodeRun, KvFinal

QUICK = {"http": 150, "twin": 150, "bulk": 400, "forms": 400, "gguf": 60, "safetensors": 100, "meta": 40, "stored": 80,
         "peers": 80}  # fmt: skip


@pytest.mark.parametrize("kind", QUICK)
async def test_a_few_of_each_kind(kind: str, tmp_path: Path) -> None:
    board, told = Board(), []
    async with KINDS[kind].open(tmp_path) as fuzzer:
        await drive(fuzzer, 11, 0, QUICK[kind], board, told.append)
    assert not told
    assert (board["inputs"], board["crashes"], board["hangs"]) == (QUICK[kind], 0, 0)
    assert board["refused"] > 0 < board["accepted"], "both must be among so many"


class Faulty:
    width = 2

    async def one(self, rng: Random) -> bool:
        match rng.randrange(4):
            case 0:
                raise RuntimeError("nobody expected this")
            case 1:
                logging.getLogger("product").error("swallowed", exc_info=ValueError("this neither"))
        return True

    async def ends(self) -> None:
        pass


async def test_what_is_raised_and_what_is_only_logged_are_crashes(caplog: pytest.LogCaptureFixture) -> None:
    board, told = Board(), []
    await drive(Faulty(), 0, 0, 40, board, once_each(told.append))
    drawn = [Random(f"0/{number}").randrange(4) for number in range(40)]
    assert board["crashes"] == drawn.count(0) + drawn.count(1)
    assert board["accepted"] == 40 - drawn.count(0)
    assert len(told) == 2, "one of each sort is told"


def test_an_input_is_known_by_its_number() -> None:
    def draw(number: int) -> tuple[Any, bytes]:
        rng = Random(f"3/{number}")
        return tree(rng), damaged(rng, b"some sound bytes" * 8)

    assert pack(draw(5)) == pack(draw(5))
    assert len({pack(draw(number)) for number in range(50)}) == 50


@pytest.mark.parametrize("message", [DecodeRun, KvFinal])
def test_typed_messages_are_right_by_their_types(message: type[Any]) -> None:
    """Else all would end at the gate."""
    messages = Messages({})
    for number in range(50):
        drawn = messages.of(Random(number), message)
        payload = pack(drawn)
        assert payload == b"\xc1" or decode(message, payload), "or it has no form on the wire"


def test_spoiling_leaves_the_sound_value_alone() -> None:
    value = {"a": [1, {"b": 2}], "c": {}}
    before = json.dumps(value)
    changed = [spoiled(Random(number), value, lambda _: "new") for number in range(60)]
    assert json.dumps(value) == before
    assert sum(each != value for each in changed) > 50


@pytest.mark.parametrize("name", seeds.CONFIGS)
def test_the_sound_folders_are_accepted(name: str, tmp_path: Path) -> None:
    """Else what is wrong with them would hide all else."""
    assert use(seeds.model(name).write(tmp_path))


@pytest.mark.parametrize("name", FORMATS)
def test_the_sound_gguf_files_are_accepted(name: str, tmp_path: Path) -> None:
    file = tmp_path / "model.gguf"
    file.write_bytes(gguf(name).content)
    assert use(file)


def test_counts_outlive_the_process_that_made_them(tmp_path: Path) -> None:
    with shared_board(tmp_path / "board") as board:
        board["inputs"] += 7
    with shared_board(tmp_path / "board") as again:
        assert again["inputs"] == 7


def test_the_table_and_the_arguments() -> None:
    assert arguments(["--only", "gguf", "bulk"]).only == ["gguf", "bulk"]
    assert arguments([]).inputs == 100_000
    shown = render([Result("gguf", 10, 7, 3, slowest_ms=12.3, slowest_at=4)])
    assert "12 (#4)" in shown
    assert Result("gguf").sound
    assert not Result("gguf", hangs=1).sound
