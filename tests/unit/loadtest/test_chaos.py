"""What the chaos test would call wrong, doubled, missing or leaked, it does; its proxy cuts off one process alone."""

from __future__ import annotations

import asyncio
import random
import sys
import time
from types import SimpleNamespace
from typing import Any

import pytest

from loadtest.chaos import run
from loadtest.chaos.asking import Told
from loadtest.chaos.judging import DOUBLED, FAILED, MISSING, REFUSED, RIGHT, WRONG, Judged, judge, longest_gap, outcome
from loadtest.chaos.leaks import grown
from loadtest.chaos.questions import Right, questions
from loadtest.chaos.strikes import KILLED, KINDS, WAYS, Strike, Strikes
from pdbus.bus.bus import connect
from pdbus.messages.debug import Holdings
from pdbus.messages.workers import Cancel
from pdbus.subjects import CANCEL
from tests.support.simulated_time import simulated
from tests.support.until import until

EXPECTED = Right(((1, 2, 3, 4), (5, 6)), ("abcd", "ef"))


def told(*parts: list[int], sent: float = 0.0, end: float = 1.0, **more: str) -> Told:
    texts = ["".join("_abcdef"[id] for id in part) for part in parts]
    return Told(0, "HTTP streamed", sent, end, 1, list(parts), texts, **more)  # type: ignore[arg-type]


def judged(one: Told, right: Right = EXPECTED) -> Judged:
    return Judged.of(one, right)


def cased(*texts: str, refused: str = "") -> Told:
    """Of the right tokens."""
    one = told([1, 2, 3, 4], [5, 6], refused=refused)
    one.texts = list(texts)
    return one


@pytest.mark.parametrize(
    ("seen", "what"),
    [
        (told([1, 2, 3, 4], [5, 6]), RIGHT),
        (told([1, 2, 2, 3, 4], [5, 6]), DOUBLED),
        (told([1, 2, 4], [5, 6]), MISSING),
        (told([1, 2, 3, 4]), MISSING),
        (told([1, 2, 3, 5], [5, 6]), WRONG),
        (told([1, 2], [], refused="unavailable"), REFUSED),
        (told([1, 3], [], refused="unavailable"), WRONG),
        (told(failed="internal_error"), FAILED),
        (cased("abcd", "eF"), WRONG),
        (cased("abcd", "e"), WRONG),
        (cased("abcd", "e", refused="unavailable"), REFUSED),
        (cased("abd", "", refused="unavailable"), WRONG),
    ],
)
def test_each_outcome_is_told_apart(seen: Told, what: str) -> None:
    assert outcome(seen, EXPECTED) == what
    found = judge([judged(seen)] * 1000, [], lambda strike: ())
    assert found.sound == (what == RIGHT)


def test_one_refusal_in_a_thousand_is_allowed() -> None:
    all = [judged(told([1, 2, 3, 4], [5, 6]))] * 999 + [judged(told(refused="overloaded"))]
    assert judge(all, [], lambda strike: ()).sound
    assert not judge(all[500:], [], lambda strike: ()).sound


def test_a_request_counts_for_the_strikes_that_it_saw() -> None:
    strike = Strike(KILLED, "decode-1", 10.0, 12.0)
    all = [judged(told(sent=sent, end=sent + 2), Right((), ())) for sent in (5.0, 9.0, 11.0, 13.0)]
    assert judge(all, [strike], lambda strike: [strike.kind]).struck == {("decode", RIGHT): 2}


def test_the_gap_is_of_the_streams_that_ran_when_it_came() -> None:
    strike = Strike(KILLED, "decode-1", 10.0, 12.0)
    on_it, later = told(sent=8.0, end=15.0), told(sent=10.5, end=20.0)
    for now_s in (9.0, 9.9, 11.4, 11.41, 14.9):
        on_it.came(now_s)
    later.came(19.0)
    assert longest_gap(strike, [judged(on_it), judged(later)]) == pytest.approx(3.49)
    assert longest_gap(strike, [judged(later)]) is None


def test_growth_is_held_against_a_processes_kind() -> None:
    def one(id: str, **kept: int) -> Holdings:
        return Holdings("router", id, "i", {}, kept)

    before = {"r-1": one("r-1", tasks=20, files=30), "r-2": one("r-2", tasks=25, files=30)}
    assert grown(before, {"r-1": one("r-1", tasks=30, files=30, rss_bytes=1 << 20)}) == []
    leaky = grown(before, {"r-1": one("r-1", tasks=80, files=30, rss_bytes=1 << 30)})
    assert [line.split()[2] for line in leaky] == ["tasks", "rss_bytes"]


def test_whatever_a_client_fails_of_is_counted_and_the_next_one_asks() -> None:
    """Else one surprise would end half an hour without a report."""

    class Broken:
        async def ask(self, *asked: object, **how: object) -> None:
            raise KeyError("choices")

    async def asking() -> list[Judged]:
        judged: list[Judged] = []
        here: Any = SimpleNamespace(rng=random.Random(1), caller=Broken(), client=None)
        until_s = time.monotonic() + 10.0
        await run._ask_on(here, questions(4, 2048, 1), dict.fromkeys(range(4), EXPECTED), judged, until_s)
        return judged

    judged = simulated(asking)
    assert {one.what for one in judged} == {FAILED}
    assert 2 <= len(judged) <= 11


async def test_every_kind_of_service_is_struck_in_every_way(monkeypatch: pytest.MonkeyPatch) -> None:
    """In the half hour of the long form, a strike every 30 s."""
    struck: list[tuple[str, str]] = []

    async def strike(self: Strikes, kind: str, way: str) -> None:
        struck.append((kind, way))

    monkeypatch.setattr(Strikes, "strike", strike)
    strikes = Strikes(None, None, lambda: 0, None, random.Random(1))  # type: ignore[arg-type]
    for _ in range(60):
        await strikes.next(0.0)
    assert set(struck) == {(kind, way) for kind in KINDS for way in WAYS}


def test_the_same_seed_asks_the_same() -> None:
    assert questions(20, 2048, 7) == questions(20, 2048, 7) != questions(20, 2048, 8)


async def test_the_proxy_cuts_off_one_process_and_no_other(nats_url: str) -> None:
    proxy = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "loadtest.chaos.proxy", nats_url.removeprefix("nats://"),
        stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE,
    )  # fmt: skip
    assert proxy.stdin
    assert proxy.stdout
    try:
        url = f"nats://127.0.0.1:{int(await proxy.stdout.readline())}"
        async with connect(url, name="decode decode-1") as cut, connect(url, name="decode decode-2") as other:
            got: dict[str, list[str]] = {"cut": [], "other": []}
            await cut.subscribe(CANCEL(), lambda message: got["cut"].append(message.request_id))
            await other.subscribe(CANCEL(), lambda message: got["other"].append(message.request_id))
            proxy.stdin.write(b"cut decode-1\n")
            for number in range(100):  # until the command is heard
                await other.publish(CANCEL(), Cancel(f"{number}", 1, "r", ()))
                await other.transport.barrier()
                if got["other"] and len(got["cut"]) < len(got["other"]):
                    break
            await until(lambda: not cut.transport.connected, 60)
            assert other.transport.connected
            proxy.stdin.write(b"mend decode-1\n")
            await until(lambda: cut.transport.connected, 60)
            await cut.transport.barrier()
            await other.publish(CANCEL(), Cancel("last", 1, "r", ()))
            await until(lambda: got["cut"][-1:] == ["last"])
    finally:
        proxy.kill()
        await proxy.wait()
