"""Versions are loaded when wanted or asked for, kept while pinned, and dropped when nothing needs them."""

from __future__ import annotations

import asyncio
import threading
from pathlib import Path
from typing import Any

import pytest

from pdbus.caching.cache_folder import CacheFolder
from pdbus.context import Deadline
from pdbus.engine import failure
from pdbus.engine import loaded as subject
from pdbus.engine.failure import NotYet
from pdbus.engine.version import Pin, Version
from pdbus.engine.versions import Versions
from pdbus.errors import RootGone, Unavailable
from pdbus.messages.changelog import Commit, Forget, LogEntry
from pdbus.model.backend import Backend
from pdbus.model.backends import BackendOptions, open_backend
from pdbus.model.checkpoint import Checkpoint, open_checkpoint
from pdbus.model.config import ModelConfig
from pdbus.settings import SettingsError
from pdbus.weights.history import History
from tests.support.asking import until
from tests.support.checkpoints import tiny_checkpoint
from tests.support.workers import LocalSource


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Checkpoint]:
    folder = tmp_path_factory.mktemp("versions")
    made = {name: open_checkpoint(tiny_checkpoint(folder / name, "llama", seed=seed)) for seed, name in enumerate("ab")}
    larger = tiny_checkpoint(folder / "larger", "llama", num_hidden_layers=3)
    return made | {"larger": open_checkpoint(larger)}


@pytest.fixture
def source(checkpoints: dict[str, Checkpoint]) -> LocalSource:
    return LocalSource(checkpoints)


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(subject, "_LOOK_S", 0.01)
    monkeypatch.setattr(failure, "_RETRY_S", 0.01)


def torch_backend(config: ModelConfig) -> Backend:
    return open_backend(BackendOptions("torch"), config)


def soon() -> Deadline:
    return Deadline.after(30)


async def test_wanted_versions_are_loaded_and_unwanted_ones_dropped(source: LocalSource) -> None:
    a, b = source.root_of["a"], source.root_of["b"]
    async with Versions(source, torch_backend) as versions:
        assert (versions.roots, versions.page_format) == ((), None)
        versions.want([a])
        assert (await versions.first()).root == a
        versions.want([b])
        await until(lambda: versions.roots == (b,))


async def test_the_first_version_stays_until_it_is_taken_though_the_log_moves_on_meanwhile(
    source: LocalSource, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A worker that starts while weights change has to come up all the same."""
    a = source.root_of["a"]
    versions = Versions(source, torch_backend)
    load = versions._load

    async def slow(root: bytes) -> Version:
        version = await load(root)
        versions.want([])  # the next one is wanted by now, and so for ever
        return version

    monkeypatch.setattr(versions, "_load", slow)
    async with versions:
        versions.want([a])
        assert (await asyncio.wait_for(versions.first(), 60)).root == a
        await until(lambda: versions.roots == ())
        versions.want([a])
        assert (await asyncio.wait_for(versions.first(), 60)).root == a, "after none was there any more"


async def test_a_pin_keeps_a_version_until_it_is_released(source: LocalSource) -> None:
    a, b = source.root_of["a"], source.root_of["b"]
    async with Versions(source, torch_backend) as versions:
        versions.want([a])
        await versions.first()
        with await versions.pin(a, soon()) as pin:
            versions.want([b])
            await until(lambda: b in versions.roots)
            assert pin.version is versions.get(a)
            pin.release()
            pin.release()
            await until(lambda: versions.roots == (b,))


async def test_a_version_that_a_request_names_is_loaded_and_lingers(
    source: LocalSource, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(subject, "_LINGER_S", 0.5)
    a, b = source.root_of["a"], source.root_of["b"]
    async with Versions(source, torch_backend) as versions:
        versions.want([a])
        pins: list[Pin] = await asyncio.gather(versions.pin(b, soon()), versions.pin(b, soon()))
        assert pins[0].version.pins == 2
        for pin in pins:
            pin.release()
        await until(lambda: b not in versions.roots)
        assert a in versions.roots


async def test_a_deleted_version_does_not_linger(source: LocalSource) -> None:
    a, b = source.root_of["a"], source.root_of["b"]
    async with Versions(source, torch_backend) as versions:
        versions.want([a])
        (await versions.pin(b, soon())).release()
        versions.forget(b)
        await until(lambda: versions.roots == (a,))


async def test_what_can_not_be_had_is_root_gone_and_disturbs_nothing(source: LocalSource) -> None:
    a = source.root_of["a"]
    async with Versions(source, torch_backend) as versions:
        versions.want([a])
        await versions.first()
        for number in range(40):
            with pytest.raises(RootGone):
                await versions.pin(number.to_bytes(32, "big"), soon())
        with pytest.raises(RootGone):  # its pages are of another shape than this worker's
            await versions.pin(source.root_of["larger"], soon())
        assert versions.roots == (a,)
        (await versions.pin(a, soon())).release()


async def test_a_version_that_is_given_up_while_it_is_loaded_holds_up_none_after_it(source: LocalSource) -> None:
    """Its blocks are nowhere any more: the fetch would be tried until its deadline."""
    a, b = source.root_of["a"], source.root_of["b"]
    load_tensors, asked = source.tensors, asyncio.Event()

    async def never(root: bytes, *given: Any, **options: Any) -> Any:
        if root == a:
            asked.set()
            await asyncio.Event().wait()
        return await load_tensors(root, *given, **options)

    source.tensors = never  # type: ignore[method-assign]
    history = History()
    history.apply(1, 1, LogEntry(commit=Commit("1", a, None, "me", "", ())))
    async with Versions(source, torch_backend) as versions:
        versions.follow(history)
        await asyncio.wait_for(asked.wait(), 60)
        history.apply(2, 2, LogEntry(commit=Commit("2", b, a, "me", "", ())))
        versions.follow(history)
        history.apply(3, 3, LogEntry(forget=Forget((a,), "me")))
        versions.follow(history)
        assert (await asyncio.wait_for(versions.first(), 60)).root == b


@pytest.mark.parametrize("opened_first", [False, True])
async def test_what_was_opened_for_a_version_that_is_given_up_serves_the_next(
    source: LocalSource, opened_first: bool
) -> None:
    """A second one would be left open for ever."""
    a, b = source.root_of["a"], source.root_of["b"]
    entered, gate, made = threading.Event(), threading.Event(), list[Backend]()

    def slow(config: ModelConfig) -> Backend:
        entered.set()
        gate.wait(60)
        made.append(torch_backend(config))
        return made[-1]

    history = History()
    history.apply(1, 1, LogEntry(commit=Commit("1", a, None, "me", "", ())))
    async with Versions(source, slow) as versions:
        versions.follow(history)
        assert await asyncio.to_thread(entered.wait, 60)
        history.apply(2, 2, LogEntry(commit=Commit("2", b, a, "me", "", ())))
        history.apply(3, 3, LogEntry(forget=Forget((a,), "me")))
        versions.follow(history)
        if opened_first:
            gate.set()
            assert versions._opening
            await asyncio.wait([versions._opening])
        await until(lambda: versions._under_way is not None and versions._under_way[0] == b)
        gate.set()
        assert (await asyncio.wait_for(versions.first(), 60)).root == b
        assert made == [versions.backend]


async def test_what_is_better_loaded_later_keeps_no_other_waiting(
    source: LocalSource, monkeypatch: pytest.MonkeyPatch
) -> None:
    a, b = source.root_of["a"], source.root_of["b"]
    versions = Versions(source, torch_backend)
    load, later = versions._load, True

    async def held(root: bytes) -> Version:
        if root == a and later:
            raise NotYet
        return await load(root)

    monkeypatch.setattr(versions, "_load", held)
    async with versions:
        versions.want([a, b])
        assert (await versions.first()).root == b
        later = False
        await until(lambda: a in versions.roots)


async def test_a_load_that_takes_too_long_is_root_gone_and_goes_on(source: LocalSource) -> None:
    gate = asyncio.Event()
    load_tensors = source.tensors

    async def slow(*args: Any, **options: Any) -> Any:
        await gate.wait()
        return await load_tensors(*args, **options)

    source.tensors = slow  # type: ignore[method-assign]
    a = source.root_of["a"]
    async with Versions(source, torch_backend) as versions:
        with pytest.raises(RootGone):
            await versions.pin(a, Deadline.after(0.05))
        gate.set()
        (await versions.pin(a, soon())).release()


async def test_too_many_wishes_at_once_are_refused(source: LocalSource, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(subject, "_MOST_WISHES", 2)

    async def never(*args: Any, **options: Any) -> Any:
        await asyncio.Event().wait()

    source.manifest = never  # type: ignore[method-assign]
    async with Versions(source, torch_backend) as versions:
        for number in range(2):
            with pytest.raises(RootGone, match="not loaded"):
                await versions.pin(bytes([number]) * 32, Deadline.after(0.01))
        with pytest.raises(RootGone, match="too many"):
            await versions.pin(bytes([9]) * 32, soon())


async def test_a_wanted_version_is_tried_again_until_it_can_be_had(source: LocalSource) -> None:
    tries = 0
    manifest = source.manifest

    async def flaky(*args: Any) -> Any:
        nonlocal tries
        tries += 1
        if tries < 3:
            raise Unavailable("no param-server yet")
        return await manifest(*args)

    source.manifest = flaky  # type: ignore[method-assign]
    async with Versions(source, torch_backend) as versions:
        versions.want([source.root_of["a"]])
        await until(lambda: "no param-server yet" in versions.detail)
        await versions.first()
        assert (tries, versions.detail) == (3, "")


async def test_unchanged_layers_are_shared_between_versions(source: LocalSource) -> None:
    a = source.root_of["a"]
    async with Versions(source, torch_backend) as versions:
        versions.want([a])
        first = await versions.first()
        asked: list[Any] = []
        tensors = source.tensors

        async def noting(*args: Any, **options: Any) -> Any:
            asked.append(args)
            return await tensors(*args, **options)

        source.tensors = noting  # type: ignore[method-assign]
        twin = b"t" * 32
        source.manifests[twin], source._checkpoints[twin] = source.manifests[a], source._checkpoints[a]
        with await versions.pin(twin, soon()) as pin:
            assert asked == []
            assert pin.version.model.layers[0] is first.model.layers[0]
            assert pin.version.scope == first.scope


async def test_a_budget_that_no_version_fits_in_ends_the_start_and_says_what_would_do(
    source: LocalSource, tmp_path: Path
) -> None:
    def too_small(config: ModelConfig) -> Backend:
        return open_backend(BackendOptions("torch", folder=CacheFolder(tmp_path, 1 << 30), weight_bytes=1000), config)

    async with Versions(source, too_small) as versions:
        versions.want([source.root_of["a"]])
        with pytest.raises(SettingsError, match=r"PDBUS_WEIGHT_BYTES is 1000; this model needs at least \d+"):
            await versions.first()


async def test_a_newer_version_is_told_apart_from_what_is_kept_of_the_older_one(source: LocalSource) -> None:
    kept: list[tuple[int, int]] = []
    a = source.root_of["a"]
    async with Versions(source, torch_backend, on_kept=lambda blocks, size: kept.append((blocks, size))) as versions:
        versions.want([a])
        await versions.first()
        twin = b"t" * 32
        source.manifests[twin], source._checkpoints[twin] = source.manifests[a], source._checkpoints[a]
        (await versions.pin(twin, soon())).release()
    tensors = [tensor for tensor in source.manifests[a].tensors.values() if not tensor.name.startswith("meta/")]
    assert kept == [(0, 0), (sum(len(tensor.blocks) for tensor in tensors), sum(tensor.nbytes for tensor in tensors))]
