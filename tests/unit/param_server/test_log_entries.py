from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from pdbus.context import Deadline
from pdbus.messages.changelog import Commit, Forget, LogEntry, Ref
from pdbus.messages.presence import WHOLE_PROMPTS, Card
from pdbus.param_server.commit import LogWriter, changed_layers, due_refs, is_new_wish
from pdbus.param_server.holdings import add_manifests
from pdbus.param_server.store import BlockStore
from pdbus.peers.weights import BlockReader
from pdbus.weights.history import History
from tests.support.weights import manifest_and_blocks, some_arrays

A, B, C = b"A" * 32, b"B" * 32, b"C" * 32


def after(*steps: bytes | tuple[str, bytes]) -> History:
    """A root is committed, a (name, root) moves a ref."""
    history = History()
    for seq, step in enumerate(steps, 1):
        if isinstance(step, bytes):
            entry = LogEntry(commit=Commit(f"tx{seq}", step, history.head("stable"), "me", "", ()))
        else:
            entry = LogEntry(ref=Ref(step[0], step[1], "me"))
        history.apply(seq, seq, entry)
    return history


@pytest.mark.parametrize(
    ("history", "root", "wished", "new"),
    [
        (after(), A, None, True),
        (after(A), A, None, False),
        (after(A), B, None, True),
        (after(A), B, A, True),
        (after(A, ("stable", A), B, ("stable", B)), A, A, False),  # a restart undoes no later push
        (after(A, ("stable", A), B, ("stable", B)), A, None, False),  # nor does a new server with an old checkpoint
        (after(A, ("stable", A), B, ("stable", B)), A, B, True),  # its checkpoint was changed back
        (after(A, ("stable", A), B, ("stable", B), ("stable", A)), B, B, False),  # a rollback stays
        (after(), A, A, True),  # the log was lost
    ],
)
def test_when_a_checkpoint_is_a_new_wish(history: History, root: bytes, wished: bytes | None, new: bool) -> None:
    assert is_new_wish(history, root, wished) is new


def test_a_checkpoint_that_was_committed_with_tables_is_no_new_wish() -> None:
    history = after(A)
    history.apply(2, 2, LogEntry(commit=Commit("tx2", C, A, "me", "", (), checkpoint=B)))
    assert not is_new_wish(history, B, None)
    assert is_new_wish(history, b"D" * 32, None)


def test_a_server_that_restarts_wishes_nothing_new_of_a_version_that_was_given_up() -> None:
    history = after(A, B)
    history.apply(3, 3, LogEntry(forget=Forget((A,), "me")))
    assert not is_new_wish(history, A, A)


def card(service: str, *roots: bytes, state: str = "ready") -> Card:
    return Card(service, "x", "i", 1, state, "m", roots)  # type: ignore[arg-type]


def test_a_ref_moves_when_a_worker_of_each_kind_is_ready_with_the_head() -> None:
    history = after(A)
    ready = [card("prefill", B), card("prefill", B, A)], [card("decode", A)]
    assert due_refs(history, *ready) == {"stable": A}
    assert not due_refs(history, [], ready[1])
    assert not due_refs(history, ready[0], [])
    assert not due_refs(history, ready[0], [card("decode", B)])
    assert not due_refs(history, ready[0], [card("decode", A, state="starting")])
    assert not due_refs(history, ready[0], [card("decode", A, state="draining")])
    encoder = replace(card("prefill", A), embeds=True)
    assert due_refs(history, [encoder], []) == {"stable": A}, "there is nothing to decode"
    assert not due_refs(history, [replace(encoder, state="starting")], [])
    assert not due_refs(history, [replace(encoder, roots=(B,))], ready[1])


def test_a_ref_moves_for_a_decode_worker_that_needs_no_other() -> None:
    history, alone = after(A), replace(card("decode", A), local_tokens=WHOLE_PROMPTS)
    assert due_refs(history, [], [alone])
    assert not due_refs(history, [], [replace(alone, local_tokens=512)])
    assert not due_refs(history, [], [replace(alone, state="starting")])
    assert not due_refs(history, [], [replace(alone, roots=(B,)), card("decode", A)])


def test_only_heads_that_their_refs_do_not_name_are_due() -> None:
    workers = [card("prefill", A, B)], [card("decode", A, B)]
    assert due_refs(after(A, ("stable", A)), *workers) == {}
    assert due_refs(after(A, ("stable", A), B), *workers) == {"stable": B}
    assert due_refs(after(A, ("stable", A), B, ("stable", B), ("stable", A)), *workers) == {}
    assert due_refs(after(A, ("canary", A)), *workers) == {"stable": A}


async def test_a_ref_does_not_follow_to_a_head_that_was_taken_back_since_it_was_found_due() -> None:
    history, appended = after(A, ("stable", A), B), list[LogEntry]()

    async def append(to: Any, entry: LogEntry, **given: Any) -> None:
        appended.append(entry)

    async def caught_up(deadline: Deadline) -> None: ...

    bus: Any = SimpleNamespace(logs=SimpleNamespace(append=append))
    follower: Any = SimpleNamespace(history=history, seq=3, caught_up=caught_up)
    writer = LogWriter(bus, "m", "server", follower, BlockReader(bus, "m", follower))
    await writer.move_ref("stable", B, Deadline.after(5))
    assert [entry.ref and entry.ref.root for entry in appended] == [B]
    history.apply(4, 4, LogEntry(ref=Ref("stable", A, "me")))
    await writer.move_ref("stable", B, Deadline.after(5))
    assert len(appended) == 1


@pytest.mark.parametrize("told", [True, False])
async def test_a_new_server_asks_the_log_whether_an_old_checkpoint_was_wished_for_before(
    tmp_path: Path, told: bool
) -> None:
    """Its history may begin with a checkpoint of the log, which tells of no version that is long dead."""
    manifest, _ = manifest_and_blocks(some_arrays())
    head, _ = manifest_and_blocks(some_arrays(1))
    history, appended = after(head.root), list[LogEntry]()
    old = Commit("old", A, None, "me", "", (), checkpoint=manifest.root if told else B)

    async def between(to: Any, after: int, upto: int) -> AsyncIterator[Any]:
        yield SimpleNamespace(entry=LogEntry(commit=old))

    async def append(to: Any, entry: LogEntry, **given: Any) -> None:
        appended.append(entry)
        history.apply(history.seq + 1, 10, entry)

    async def caught_up(deadline: Deadline) -> None: ...

    bus: Any = SimpleNamespace(logs=SimpleNamespace(append=append, between=between))
    follower: Any = SimpleNamespace(history=history, seq=1, born="today", caught_up=caught_up)
    writer = LogWriter(bus, "m", "server", follower, BlockReader(bus, "m", follower))
    with BlockStore(tmp_path, "m") as store:
        with store.writing() as pack:
            add_manifests(head, store, pack)
        for _ in range(2):  # the second time it is its own
            await writer.commit(manifest, store, "checkpoint", Deadline.after(5))
    assert history.head("stable") == (head.root if told else manifest.root)
    assert len(appended) == (not told)


def test_a_commit_names_the_layers_that_differ_from_its_parent() -> None:
    name = "model.layers.1.self_attn.q_proj.weight"
    before, _ = manifest_and_blocks(some_arrays())
    now, _ = manifest_and_blocks(some_arrays(**{name: some_arrays()[name] + 1}))
    assert [layer for layer, _ in changed_layers(now, before)] == ["layers.1"]
    assert changed_layers(now, now) == ()
    assert [layer for layer, _ in changed_layers(now, None)] == ["embed", "layers.0", "layers.1", "head", "meta"]
