"""Real processes of a tiny model die, hang, drain and restart under load: every stream is whole, and nothing leaks."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from functools import partial
from typing import Any
from urllib.parse import urlsplit

import aiohttp
import pytest

from loadtest.client import Observation, ask, session
from loadtest.failover.trial import KILL, STOP, Way, busiest, idle, trial
from loadtest.tiny import tiny_checkpoint
from pdbus.bus.bus import connect
from pdbus.bus.presence import Fleet
from pdbus.context import Deadline
from tests.support.cable import cable
from tests.support.stack import Stack, running_stack

STREAMS, TOKENS, AFTER = 4, 700, 60
LONG = 1800
"""Tokens: as many as fit the model's context beside the prompt."""
PATIENCE_S = 120.0
pytestmark = pytest.mark.timeout(400)


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    folder = tmp_path_factory.mktemp("failover")
    model = tiny_checkpoint(folder / "model")
    options = ("--model", str(model), "--prefill", "2", "--decode", "2")
    with running_stack(folder / "data", *options, env={"PDBUS_MOST_RUNNING": "16"}) as running:
        yield running


@asynccontextmanager
async def client(stack: Stack) -> AsyncIterator[tuple[aiohttp.ClientSession, Fleet]]:
    async with session() as http, connect(stack.nats_url, name="test") as bus, Fleet(bus) as fleet:
        wanted = {"decode": 2, "prefill": 2, "router": 1}
        await fleet.wait_for(
            lambda fleet: all(
                sum(card.state == "ready" for card in fleet.live(service)) == count for service, count in wanted.items()
            ),
            Deadline.after(PATIENCE_S),
        )
        yield http, fleet


def bodies(stack: Stack, label: str, count: int = STREAMS, tokens: int = TOKENS) -> list[dict[str, Any]]:
    """Greedy and seeded ones in turn."""
    sampled = {"temperature": 1.0, "seed": 11}
    return [
        {"model": stack.model, "prompt": f"{label} {at} " * 12, "max_tokens": tokens, "ignore_eos": True}
        | {"return_token_ids": True}
        | (sampled if at % 2 else {"temperature": 0})
        for at in range(count)
    ]


async def undisturbed(http: aiohttp.ClientSession, stack: Stack, asked: list[dict[str, Any]]) -> list[list[int]]:
    answers = await asyncio.gather(*(ask(http, stack.url, body, 0.0, 0.0, PATIENCE_S) for body in asked))
    assert [answer.error for answer in answers] == [None] * len(asked)
    return [answer.ids for answer in answers]


def whole(answers: list[Observation] | tuple[Observation, ...], expected: list[list[int]]) -> None:
    assert [answer.error for answer in answers] == [None] * len(answers)
    assert [answer.ids for answer in answers] == expected


@pytest.mark.parametrize("how", [KILL, STOP], ids=["SIGKILL", "SIGSTOP"])
async def test_streams_of_a_decode_worker_that_dies_or_hangs_go_on_elsewhere(stack: Stack, how: Way) -> None:
    """After SIGSTOP it is continued: it finds its work gone, and frees all of it (`trial` waits for that)."""
    async with client(stack) as (http, fleet):
        asked = bodies(stack, f"decode {how.dies}")
        expected = await undisturbed(http, stack, asked)
        for _ in range(5):  # on a machine so quick that they end before a card tells who writes them
            seen = await trial(http, stack, fleet, asked, how, AFTER)
            whole(seen.answers, expected)
            if seen.next_token_s:
                break
        assert seen.next_token_s, "it was writing some of them"


@pytest.mark.slow
async def test_streams_of_a_decode_worker_whose_network_is_lost_go_on_elsewhere(stack: Stack) -> None:
    """Nobody hears from it, nor it from anybody; once it is back it frees what it has written on for nobody."""
    at = urlsplit(stack.nats_url)
    async with (
        client(stack) as (http, fleet),
        cable(str(at.hostname), at.port or 4222) as network,
        _decode_worker(stack, f"nats://127.0.0.1:{network.port}", "decode-far"),
    ):
        await fleet.wait_for(
            lambda fleet: any(card.id == "decode-far" and card.state == "ready" for card in fleet.live("decode")),
            Deadline.after(PATIENCE_S),
        )
        asked = bodies(stack, "network", 6, LONG)
        expected = await undisturbed(http, stack, asked)
        for _ in range(10):  # on a machine so quick that they end before a card tells who writes them
            running = await _written_by(http, stack, fleet, "decode-far", asked)
            if running:
                break
        assert running, "it wrote some of them"
        network.pull()
        whole(await asyncio.gather(*running), expected)
        await fleet.wait_for(lambda fleet: fleet.state("decode-far") == "dead", Deadline.after(PATIENCE_S))
        network.plug_in()
        await fleet.wait_for(lambda fleet: fleet.state("decode-far") == "live", Deadline.after(PATIENCE_S))
        await idle(fleet)


async def _written_by(
    http: aiohttp.ClientSession, stack: Stack, fleet: Fleet, worker: str, asked: list[dict[str, Any]]
) -> list[asyncio.Task[Observation]]:
    """The streams, none of which is near its end, as soon as that worker's card says that it writes some of them. Empty
    where one came near its end before that."""
    seen = [Observation(0.0) for _ in asked]
    running = [
        asyncio.create_task(ask(http, stack.url, body, 0.0, 0.0, PATIENCE_S, one))
        for body, one in zip(asked, seen, strict=True)
    ]
    while all(len(one.ids) < LONG - AFTER and not task.done() for one, task in zip(seen, running, strict=True)):
        card = fleet.card(worker)
        if card and card.load.running and all(len(one.ids) >= AFTER for one in seen):
            return running
        await asyncio.sleep(0.01)
    await asyncio.gather(*running)
    await idle(fleet)
    return []


@asynccontextmanager
async def _decode_worker(stack: Stack, nats_url: str, id_: str) -> AsyncIterator[None]:
    """One more, by hand."""
    settings = {"NATS_URL": nats_url, "PDBUS_ID": id_, "PDBUS_MODEL": stack.model, "OMP_NUM_THREADS": "1"}
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "pdbus.decode", env={**os.environ, **settings, "PDBUS_THREADS": "1"}
    )
    try:
        yield
        process.terminate()
        async with asyncio.timeout(PATIENCE_S):
            assert await process.wait() == 0
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()


@pytest.mark.slow
@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP])
async def test_prompts_of_a_prefill_worker_that_dies_or_hangs_are_read_elsewhere(
    stack: Stack, how: signal.Signals
) -> None:
    async with client(stack) as (http, fleet):
        asked = bodies(stack, f"prefill {how.name}", 8, 40)
        expected = await undisturbed(http, stack, asked)
        victim = stack.pids()["prefill-1"]
        before = fleet.card("prefill-1")
        os.kill(victim, how)
        try:
            answers = await asyncio.gather(*(ask(http, stack.url, body, 0.0, 0.0, PATIENCE_S) for body in asked))
        finally:
            if how == signal.SIGSTOP:
                os.kill(victim, signal.SIGCONT)
        whole(answers, expected)
        await idle(fleet)
        await fleet.wait_for(
            lambda fleet: any(
                card.id == "prefill-1"
                and card.state == "ready"
                and not (card.load.waiting or card.load.pages_used)
                and (how == signal.SIGSTOP or card.incarnation != (before and before.incarnation))
                for card in fleet.live("prefill")
            ),
            Deadline.after(PATIENCE_S),
        )


async def test_a_worker_is_drained_by_command_while_its_streams_go_on(stack: Stack) -> None:
    async with client(stack) as (http, fleet):
        asked = bodies(stack, "drain", tokens=1600)  # the command takes a second to start
        expected = await undisturbed(http, stack, asked)
        before = {card.id: card.incarnation for card in fleet.cards()}
        seen = [Observation(0.0) for _ in asked]
        running = [
            asyncio.create_task(ask(http, stack.url, body, 0.0, 0.0, PATIENCE_S, one))
            for body, one in zip(asked, seen, strict=True)
        ]
        while any(len(one.ids) < AFTER and not task.done() for one, task in zip(seen, running, strict=True)):  # noqa: ASYNC110
            await asyncio.sleep(0.01)
        victim = busiest(fleet)
        told = await _drained(stack, victim.id)
        assert told.returncode == 0, told.stderr
        assert f"{victim.id} has ended" in told.stdout
        whole(await asyncio.gather(*running), expected)
        await fleet.wait_for(lambda fleet: _again(fleet, victim.id, before), Deadline.after(PATIENCE_S))
        await idle(fleet)


@pytest.mark.slow
async def test_a_rolling_restart_under_load_breaks_no_stream(stack: Stack) -> None:
    async with client(stack) as (http, fleet):
        asked = bodies(stack, "rolling", 3, 400)
        expected = await undisturbed(http, stack, asked)
        over = False

        async def load(body: dict[str, Any], text: list[int]) -> int:
            rounds = 0
            while not over or not rounds:
                whole([await ask(http, stack.url, body, 0.0, 0.0, PATIENCE_S)], [text])
                rounds += 1
            return rounds

        loads = asyncio.gather(*(load(body, text) for body, text in zip(asked, expected, strict=True)))
        for id_ in ("decode-1", "prefill-1", "decode-2", "prefill-2"):
            before = {card.id: card.incarnation for card in fleet.cards()}
            os.kill(stack.pids()[id_], signal.SIGTERM)
            await fleet.wait_for(partial(_again, id_=id_, before=before), Deadline.after(PATIENCE_S))
        over = True
        assert min(await loads) >= 1
        await idle(fleet)


async def _drained(stack: Stack, id_: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "pdbus.stack", "drain", id_, "--data", str(stack.data)]
    run = partial(subprocess.run, capture_output=True, text=True, timeout=PATIENCE_S, check=False)
    return await asyncio.to_thread(run, command)


async def test_draining_nobody_is_an_error(stack: Stack) -> None:
    told = await _drained(stack, "decode-9")
    assert told.returncode == 1
    assert "decode-9" in told.stderr


def _again(fleet: Fleet, id_: str, before: dict[str, str]) -> bool:
    """Another incarnation of it is ready."""
    cards = (*fleet.live("decode"), *fleet.live("prefill"))
    return any(card.id == id_ and card.state == "ready" and card.incarnation != before[id_] for card in cards)
