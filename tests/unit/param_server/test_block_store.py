from __future__ import annotations

import errno
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import pytest

from pdbus.canonical import content_digest
from pdbus.errors import Conflict, Unavailable
from pdbus.param_server import store as store_module
from pdbus.param_server.commit import Wish
from pdbus.param_server.disk import told
from pdbus.param_server.store import BlockStore
from pdbus.param_server.transactions import Transactions
from tests.support.weights import manifest_and_blocks, some_arrays

A, B, C = b"a" * 5000, b"b" * 7000, b"c" * 3
MODEL = "m"


def put(store: BlockStore, *contents: bytes) -> None:
    with store.writing() as pack:
        for content in contents:
            pack.add(content_digest(content), memoryview(content))


def get(store: BlockStore, content: bytes) -> bytes | None:
    found = store.read(content_digest(content))
    return None if found is None else bytes(found)


def test_blocks_are_there_after_writing_and_after_opening_again(tmp_path: Path) -> None:
    with BlockStore(tmp_path, MODEL) as store:
        put(store, A, B)
        put(store, C, b"")
        assert [get(store, content) for content in (A, B, C, b"")] == [A, B, C, b""]
    with BlockStore(tmp_path, MODEL) as store:
        assert [get(store, content) for content in (A, B, C, b"")] == [A, B, C, b""]
        assert get(store, b"never") is None
        assert content_digest(A) in store
        assert content_digest(b"never") not in store
        put(store, b"more")
    with BlockStore(tmp_path, MODEL) as store:
        assert get(store, b"more") == b"more"


def test_unmapped_blocks_can_be_read_as_before_and_a_reader_in_the_middle_does_not_notice(tmp_path: Path) -> None:
    with BlockStore(tmp_path, MODEL) as store:
        put(store, A, B)
        put(store, b"")
        reading = store.read(content_digest(A))
        assert reading is not None
        store.unmap([content_digest(content) for content in (A, B, b"", b"never")])
        assert reading == A
        assert [get(store, content) for content in (A, B, b"")] == [A, B, b""]


def test_a_block_added_twice_is_stored_once(tmp_path: Path) -> None:
    with BlockStore(tmp_path, MODEL) as store:
        put(store, A, A)
    assert [path.stat().st_size for path in tmp_path.glob("*.pack")] == [len(A)]


def test_what_was_not_finished_leaves_nothing(tmp_path: Path) -> None:
    with BlockStore(tmp_path, MODEL) as store:
        with suppress(RuntimeError), store.writing() as pack:
            pack.add(content_digest(A), memoryview(A))
            raise RuntimeError("stopped")
        assert get(store, A) is None
        with store.writing():
            pass
    assert [path.name for path in tmp_path.iterdir() if "pack" in path.name or "index" in path.name] == []


def test_a_process_that_was_killed_while_writing_leaves_a_sound_store(tmp_path: Path) -> None:
    script = f"""
import os, sys
sys.path[:0] = {sys.path!r}
from pathlib import Path
from tests.unit.param_server import test_block_store as t
with t.BlockStore(Path({str(tmp_path)!r}), t.MODEL) as store:
    t.put(store, t.A)
    with store.writing() as pack:
        pack.add(t.content_digest(t.B), memoryview(t.B))
        os._exit(9)
"""
    assert subprocess.run([sys.executable, "-c", script], check=False).returncode == 9
    assert list(tmp_path.glob("*.new"))
    with BlockStore(tmp_path, MODEL) as store:
        assert (get(store, A), get(store, B)) == (A, None)
        put(store, B)
        assert get(store, B) == B
    assert not list(tmp_path.glob("*.new"))


def test_a_pack_whose_index_never_came_is_removed(tmp_path: Path) -> None:
    with BlockStore(tmp_path, MODEL) as store:
        put(store, A)
        put(store, B)
    sorted(tmp_path.glob("*.index"))[1].unlink()
    with BlockStore(tmp_path, MODEL) as store:
        assert (get(store, A), get(store, B)) == (A, None)
        put(store, B)
        assert (get(store, A), get(store, B)) == (A, B)


@pytest.mark.parametrize("damage", ["index", "length"])
def test_a_damaged_pack_counts_as_absent_and_the_rest_stays(tmp_path: Path, damage: str) -> None:
    with BlockStore(tmp_path, MODEL) as store:
        put(store, A)
        put(store, B)
    if damage == "index":
        path = sorted(tmp_path.glob("*.index"))[1]
        content = bytearray(path.read_bytes())
        content[40] ^= 1
        path.write_bytes(content)
    else:
        path = sorted(tmp_path.glob("*.pack"))[1]
        path.write_bytes(path.read_bytes()[:-1])
    with BlockStore(tmp_path, MODEL) as store:
        assert (get(store, A), get(store, B)) == (A, None)


def test_a_pack_of_another_name_is_read_like_any_and_new_ones_do_not_meet_it(tmp_path: Path) -> None:
    with BlockStore(tmp_path, MODEL) as store:
        put(store, A)
    for path in list(tmp_path.glob("0*")):
        path.rename(path.with_stem("copied"))
    with BlockStore(tmp_path, MODEL) as store:
        assert store.read(content_digest(A)) == A
        put(store, B)
    with BlockStore(tmp_path, MODEL) as store:
        assert store.read(content_digest(B)) == B


@pytest.mark.parametrize(
    "text",
    ['{"deadline_ns": 1, "digests": ["zz"]}', '{"deadline_ns": 1, "digests": [1.5]}', '{"digests": []}', "[" * 100_000],
)
def test_a_transaction_that_can_not_be_read_is_none_and_the_server_starts(tmp_path: Path, text: str) -> None:
    Transactions(tmp_path).pin("good", 1, [content_digest(A)])
    for name in ("bad", "no name"):
        (tmp_path / f"tx-{name}.json").write_text(text)
    known = Transactions(tmp_path)
    known.load()
    assert [(one.tx, one.digests) for one in known] == [("good", {content_digest(A)})]


@pytest.mark.parametrize("root", ['"zz"', '"ab"', "1", "[" * 100_000])
def test_a_wish_that_can_not_be_read_is_none(tmp_path: Path, root: str) -> None:
    wish = Wish(tmp_path, "born")
    (tmp_path / "wish.json").write_text(f'{{"root": {root}, "log": "born"}}')
    assert wish.read() is None
    wish.write(content_digest(A))
    assert wish.read() == content_digest(A)


def test_a_block_that_went_bad_on_disk_is_never_read_and_can_be_written_again(tmp_path: Path) -> None:
    with BlockStore(tmp_path, MODEL) as store:
        put(store, A, B)
    path = next(tmp_path.glob("*.pack"))
    content = bytearray(path.read_bytes())
    content[10] ^= 1  # in A
    path.write_bytes(content)
    with BlockStore(tmp_path, MODEL) as store:
        assert (get(store, A), get(store, B)) == (None, B)
        assert content_digest(A) not in store
        put(store, A)
        assert get(store, A) == A


def test_a_manifest_is_found_only_when_all_of_it_is_here(tmp_path: Path) -> None:
    manifest, _ = manifest_and_blocks(some_arrays())
    contents = list(manifest.manifests())
    with BlockStore(tmp_path, MODEL) as store:
        assert store.manifest(manifest.root) is None
        put(store, *contents[:-1])
        assert store.manifest(manifest.root) is None
        put(store, contents[-1])
        assert store.manifest(manifest.root) == manifest


def test_a_folder_is_one_process_s_at_a_time(tmp_path: Path) -> None:
    with (
        BlockStore(tmp_path, MODEL),
        pytest.raises(Conflict, match="another param-server"),
        BlockStore(tmp_path, MODEL),
    ):
        pass
    with BlockStore(tmp_path, MODEL):
        pass


def test_a_foreign_folder_is_refused_and_left_as_it_is(tmp_path: Path) -> None:
    (tmp_path / "thesis.txt").write_text("mine")
    with pytest.raises(Conflict, match="something else"), BlockStore(tmp_path, MODEL):
        pass
    assert (tmp_path / "thesis.txt").read_text() == "mine"


def test_the_store_of_another_model_is_refused(tmp_path: Path) -> None:
    with BlockStore(tmp_path, MODEL):
        pass
    with pytest.raises(Conflict, match="'m', not of 'other'"), BlockStore(tmp_path, "other"):
        pass


def test_a_folder_that_cant_be_made_is_told(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(Unavailable, match="can't be used"), BlockStore(tmp_path / "file" / "store", MODEL):
        pass


def test_a_disk_that_fills_while_a_pack_is_written_leaves_the_store_as_it_was(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(fd: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with BlockStore(tmp_path, MODEL) as store:
        put(store, A)
        with monkeypatch.context() as patch:
            patch.setattr("os.fsync", full)
            with pytest.raises(Unavailable, match="is full: make room"):
                put(store, B)
        assert (get(store, A), get(store, B)) == (A, None)
        put(store, B)
        assert get(store, B) == B


def test_a_full_disk_is_told_in_words_before_and_while_writing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(Unavailable, match="is full: make room"), told(tmp_path):
        raise OSError(errno.ENOSPC, "No space left on device")
    usage = type("Usage", (), {"free": 10_000_000})
    monkeypatch.setattr(store_module.shutil, "disk_usage", lambda _: usage)
    with BlockStore(tmp_path, MODEL) as store:
        store.require_room(9_000_000)
        with pytest.raises(Unavailable, match="20 MB are needed and 10 MB are free"):
            store.require_room(20_000_000)
