"""`pdbus status`, `pdbus weights` and the log's membership, on a real NATS server."""

from __future__ import annotations

import io
import json
import os
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from pdbus.bus.bus import Bus, connect
from pdbus.bus.presence import Presence
from pdbus.canonical import digest
from pdbus.context import Deadline
from pdbus.errors import InvalidRequest, NotFound
from pdbus.messages.changelog import Commit, Forget, LogEntry, Member, Ref
from pdbus.messages.presence import Card, Load
from pdbus.peers.history import HistoryFollower
from pdbus.stack import status, weights, weights_log, weights_show
from pdbus.stack.attach import Target, find
from pdbus.stack.folder import Folder, Run
from pdbus.stack.membership import left_behind, retire
from pdbus.stack.settings import StackSettings
from pdbus.subjects import CHANGELOG

OLD, NEW = digest("old"), digest("new")


@pytest.fixture
async def bus(nats_url: str) -> AsyncIterator[Bus]:
    async with connect(nats_url, name="test") as bus:
        await bus.logs.ensure()
        yield bus


@pytest.fixture
async def target(bus: Bus, nats_url: str, unique: Callable[[str], str]) -> Target:
    """A model with two versions, the older of which is stable, and three param-servers."""
    model = unique("model")
    entries = [
        LogEntry(member=Member("param-server-1", "join")),
        LogEntry(member=Member("param-server-2", "join")),
        LogEntry(member=Member("elsewhere-1", "join")),
        LogEntry(commit=Commit("tx-1", OLD, None, "ann", "first", ())),
        LogEntry(ref=Ref("stable", OLD, "ann")),
        LogEntry(commit=Commit("tx-2", NEW, OLD, "bob", "second", (("head", NEW),))),
    ]
    for entry in entries:
        await bus.logs.append(CHANGELOG(model=model), entry, expected_seq=None, message_id=None)
    return Target(nats_url, model)


async def _history(bus: Bus, model: str) -> HistoryFollower:
    async with HistoryFollower(bus, model) as follower:
        await follower.caught_up(Deadline.after(30))
        return follower


async def test_the_log_is_told_in_order(target: Target) -> None:
    kinds = [weights_log.describe(entry)[:2] for _, _, entry in (await weights_log.entries(target))[0]]
    assert kinds == [
        ("member", "param-server-1"), ("member", "param-server-2"), ("member", "elsewhere-1"),
        ("commit", OLD.hex()[:12]), ("ref", f"stable → {OLD.hex()[:12]}"), ("commit", NEW.hex()[:12]),
    ]  # fmt: skip


async def move(target: Target, name: str, root: str) -> bytes | None:
    async with weights.opened(target) as opened:
        return await opened.move_ref(name, root, now=True)


async def test_a_ref_is_moved_by_a_prefix_and_back_again(bus: Bus, target: Target) -> None:
    assert await move(target, "stable", NEW.hex()[:8]) == NEW
    assert (await _history(bus, target.model)).history.refs == {"stable": NEW}
    assert await move(target, "stable", OLD.hex()) == OLD
    assert (await _history(bus, target.model)).history.refs == {"stable": OLD}


async def test_moving_a_ref_to_where_it_is_only_calls_a_pending_version_off(bus: Bus, target: Target) -> None:
    await move(target, "stable", "stable")
    assert (await _history(bus, target.model)).history.pending == {}
    before = await bus.logs.last_seq(CHANGELOG(model=target.model))
    await move(target, "stable", "stable")
    assert await bus.logs.last_seq(CHANGELOG(model=target.model)) == before


async def test_a_version_that_does_not_exist_is_refused(target: Target) -> None:
    with pytest.raises(NotFound, match="feedbeef"):
        await move(target, "stable", "feedbeef")


@pytest.mark.parametrize("name", ["", "a b", "pd>", "*", "é", "-x", "x" * 65, "feedbeef", OLD.hex(), "root-1"])
async def test_a_name_that_no_ref_can_have_is_refused(target: Target, name: str) -> None:
    with pytest.raises(InvalidRequest, match="can't name a ref"):
        await move(target, name, OLD.hex())


async def test_param_servers_that_are_gone_leave_and_others_stay(bus: Bus, target: Target, tmp_path: Path) -> None:
    for id in ("param-server-1", "param-server-2", "decode-1"):
        (tmp_path / id).mkdir()
    gone = left_behind(tmp_path, {"param-server-1", "decode-1"})
    assert gone == {"param-server-2"}
    await retire(bus, target.model, gone)
    await retire(bus, target.model, gone)
    follower = await _history(bus, target.model)
    assert follower.history.members == ("elsewhere-1", "param-server-1")


def test_a_folder_that_never_ran_left_nobody_behind(tmp_path: Path) -> None:
    assert left_behind(tmp_path / "absent", set()) == set()


async def test_status_shows_services_versions_and_refs(bus: Bus, target: Target) -> None:
    def card(seq: int) -> Card:
        load = Load(running=2, pages_total=8, pages_used=3)
        return Card("decode", f"decode-{target.model}", bus.incarnation, seq, "ready", target.model, (OLD,), load)

    services: list[dict[str, Any]] = []
    async with Presence(bus, card):
        while not services:  # it listens for a second only
            found = await status.look(target)
            as_json = json.loads(json.dumps(status.as_json(found)))
            services = [each for each in as_json["services"] if each["id"] == f"decode-{target.model}"]
    (decode,) = services
    assert (decode["state"], decode["roots"], decode["load"]["running"]) == ("ready", [OLD.hex()], 2)
    assert as_json["refs"] == {"stable": OLD.hex()}
    assert as_json["roots"] == [OLD.hex(), NEW.hex()]
    output = io.StringIO()
    status.show(found, Console(file=output, width=200))
    for expected in (f"decode-{target.model}", "ready", "3/8", OLD.hex()[:12], "stable", "ann", "second"):
        assert expected in output.getvalue()


def test_the_server_that_was_named_comes_before_the_folders(tmp_path: Path) -> None:
    folder = Folder(tmp_path)
    with pytest.raises(NotFound, match="pdbus up"):
        find(tmp_path, StackSettings(model="default"))
    folder.write(Run(os.getpid(), "running-model", nats_url="nats://here:1"))
    assert find(tmp_path, StackSettings(model="default")) == Target("nats://here:1", "running-model")
    assert find(tmp_path, StackSettings(model="default", nats_url="nats://there:2")) == Target(
        "nats://there:2", "default"
    )


async def test_any_fingerprint_leads_to_its_commit_whatever_became_of_the_version(bus: Bus, target: Target) -> None:
    to, gone = CHANGELOG(model=target.model), digest("gone")

    async def append(entry: LogEntry) -> None:
        await bus.logs.append(to, entry, expected_seq=None, message_id=None)

    async with weights.opened(target) as opened:

        async def told(root: bytes) -> tuple[str, str]:
            lineage = await opened.lineage(f"root-{root.hex()}")
            assert lineage.root == root
            return lineage.commit.author, weights_show.state(lineage)

        assert await told(OLD) == ("ann", "served as stable")
        assert (await told(NEW))[1].startswith("head of stable")
        await append(LogEntry(ref=Ref("canary", NEW, "bob", share=0.1)))
        assert (await told(NEW))[1] == "served as canary"
        await append(LogEntry(ref=Ref("stable", NEW, "bob")))
        await append(LogEntry(ref=Ref("canary", None, "bob")))
        await append(LogEntry(ref=Ref("stable", OLD, "ann", "rollback")))
        author, state = await told(NEW)
        assert author == "bob"
        assert "still kept: a ref can go back to it" in state
        await append(LogEntry(commit=Commit("tx-3", gone, OLD, "eve", "third", (), ref="")))
        await append(LogEntry(forget=Forget((gone,), "root")))
        author, state = await told(gone)
        assert author == "eve"
        assert state.startswith("given up by root")
        with pytest.raises(NotFound):
            await opened.lineage("root-" + "0" * 64)
