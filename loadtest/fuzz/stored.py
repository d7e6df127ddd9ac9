"""Files that a process finds when it starts: keys, packs of blocks, the disk of a cache node, what servers remember.

Each input spoils one file of a sound folder, which is then opened and read whole. A disk damages bytes; somebody with
an editor, or another version, writes what has the right checksum and the wrong content: both are tried.
"""

from __future__ import annotations

import hashlib
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from random import Random

import nkeys
import numpy as np

from loadtest.fuzz.noise import damaged
from loadtest.fuzz.stored_parts import ENTRIES, disk_keys, put, spoil_json, spoiled_record, write_store
from pdbus import keyfile
from pdbus.cache.logbook import Logbook, Place
from pdbus.caching.cache_folder import CacheFolder
from pdbus.caching.disk import DiskStore
from pdbus.canonical import content_digest
from pdbus.context import HIGHEST_PRIORITY
from pdbus.errors import Conflict, Corrupt, InvalidRequest, Overloaded, Unauthorized
from pdbus.model.shelf import Piece, Shelf
from pdbus.nats_access import NatsAccess
from pdbus.param_server.commit import Wish
from pdbus.param_server.store import BlockStore
from pdbus.param_server.transactions import Transactions
from pdbus.router.identity import Identities
from pdbus.router.quotas import Quotas
from pdbus.stack.folder import Folder, Run
from pdbus.subjects import RESULTS

_BUDGET = 1 << 20
_DISK_NAMES = ("x.kv", "-1.kv", "٣.kv", "9" * 30 + ".kv")
_STORE_NAMES = ("x", "-1", "٣", "9" * 30)


class Stored:
    width = 1

    def __init__(self, folder: Path) -> None:
        """`folder`: of which nobody else uses anything."""
        self._folder = folder
        self._keys_file, self._seed_file = folder / "keys.json", folder / "user.nk"
        self._disk_folder, self._store_folder = folder / "disk", folder / "store"
        self._runs, self._logs = Folder(folder / "stack"), Logbook(folder / "place.json")
        self._shelves = Shelf(CacheFolder(folder / "shelf", _BUDGET), "int8")
        self._forms: tuple[tuple[Callable[[Random], None], Callable[[], bool]], ...] = (
            (self._spoil_keys, self._read_keys),
            (self._spoil_seed, self._read_seed),
            (self._spoil_disk, self._read_disk),
            (self._spoil_packs, self._read_packs),
            (self._spoil_memory, self._read_memory),
            (self._spoil_logbook, self._read_logbook),
            (self._spoil_shelf, self._read_shelf),
            (self._spoil_run, self._read_run),
        )
        """What spoils a file, and what reads it as its process does: False where it is of no use any more."""
        self._write()
        self._sound = {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}

    async def one(self, rng: Random) -> bool:
        spoil, read = rng.choice(self._forms)
        spoil(rng)
        try:
            return read()
        finally:
            self._restore()

    async def ends(self) -> None:
        """What is sound is of use."""
        for _, read in self._forms:
            assert read(), f"{read.__name__} refuses a sound file"
            self._restore()

    def _restore(self) -> None:
        """What reading took away or wrote, too."""
        for path in self._folder.rglob("*"):
            if path.is_file() and path not in self._sound:
                path.unlink()
        for path, content in self._sound.items():
            if not path.exists() or path.read_bytes() != content:
                path.write_bytes(content)

    def _spoil_keys(self, rng: Random) -> None:
        spoil_json(rng, self._keys_file)

    def _read_keys(self) -> bool:
        try:
            identities = Identities(self._keys_file)
            identity, quotas = identities.of(self._key), Quotas()
            identities.salt(identity.tenant)
            for _ in range(3):
                with quotas.hold(identity, 1) as spending:
                    spending.tokens(5)
        except (InvalidRequest, Unauthorized, Overloaded):
            return False
        assert 0 <= identity.priority_most <= HIGHEST_PRIORITY
        assert RESULTS(tenant=identity.tenant, job="x")
        return True

    def _spoil_seed(self, rng: Random) -> None:
        self._seed_file.write_bytes(damaged(rng, self._seed_file.read_bytes()))

    def _read_seed(self) -> bool:
        creds = self._seed_file.with_suffix(".creds")
        creds.write_bytes(b"-----BEGIN USER NKEY SEED-----\n" + self._seed_file.read_bytes() + b"\n------END\n")
        try:
            return NatsAccess(seed=self._seed_file).options() != NatsAccess(creds=creds).options()
        except InvalidRequest:
            return False

    def _spoil_disk(self, rng: Random) -> None:
        (path,) = self._disk_folder.glob("*.kv")
        content = path.read_bytes()
        path.write_bytes(spoiled_record(rng, content) if rng.random() < 0.5 else damaged(rng, content))
        if rng.random() < 0.05:
            path.rename(path.with_name(rng.choice(_DISK_NAMES)))

    def _read_disk(self) -> bool:
        disk = DiskStore(self._disk_folder, _BUDGET, 100, 0.0)
        disk.open()
        disk.check()
        found = [entry for key in disk_keys() if (entry := disk.get(key, bytes(32), 1.0))]
        for entry in found:
            with suppress(Corrupt):
                disk.read(entry)
        disk.delete([entry.key for entry in found[:1]])
        disk.sweep(disk.unmarked())
        put(disk, b"n" * 32)
        disk.check()
        return len(found) == ENTRIES

    def _spoil_packs(self, rng: Random) -> None:
        path = rng.choice(sorted(path for path in self._store_folder.iterdir() if path.suffix in (".pack", ".index")))
        content = path.read_bytes()
        if path.suffix == ".index" and rng.random() < 0.6:
            body = damaged(rng, content[: -hashlib.sha256().digest_size])
            path.write_bytes(body + hashlib.sha256(body).digest())
        else:
            path.write_bytes(damaged(rng, content))
        if rng.random() < 0.05:
            name = rng.choice(_STORE_NAMES)
            for each in (path.with_suffix(".pack"), path.with_suffix(".index")):
                each.rename(each.with_stem(name))

    def _read_packs(self) -> bool:
        with BlockStore(self._store_folder, "toy") as store:
            for pack in store.packs:
                for digest in pack.spans:
                    store.read(digest)
                store.unmap(pack.spans)
            store.scrub(_BUDGET)
            with store.writing() as pack_of_this_life:
                pack_of_this_life.add(content_digest(b"new"), memoryview(b"new"))
            try:
                return store.manifest(self._root) is not None
            except Corrupt:
                return False

    def _spoil_memory(self, rng: Random) -> None:
        spoil_json(rng, self._store_folder / rng.choice(("tx-a.json", "wish.json", "store.json")))

    def _read_memory(self) -> bool:
        """What a param-server remembers beside its packs."""
        transactions, wish = Transactions(self._store_folder), Wish(self._store_folder, "born")
        transactions.load()
        known = "a" in transactions and wish.read() == self._root
        transactions.pin("b", 5, [bytes(32)])
        for one in transactions:
            transactions.close(one.tx)
        wish.write(bytes(32))
        try:
            with BlockStore(self._store_folder, "toy"):
                return known
        except Conflict:
            return False

    def _spoil_logbook(self, rng: Random) -> None:
        spoil_json(rng, self._folder / "place.json")

    def _read_logbook(self) -> bool:
        return self._logs.read() is not None

    def _spoil_shelf(self, rng: Random) -> None:
        (path,) = (self._folder / "shelf" / "packed").glob("??/*")
        path.write_bytes(damaged(rng, path.read_bytes()))

    def _read_shelf(self) -> bool:
        key = self._shelves.key("something")
        return self._shelves.map(key, "layers.0") is not None and self._shelves.read(key, "layers.0") is not None

    def _spoil_run(self, rng: Random) -> None:
        spoil_json(rng, self._runs.path / "run.json")

    def _read_run(self) -> bool:
        self._runs.running()
        return self._runs.read() is not None

    def _write(self) -> None:
        self._key = keyfile.add(self._keys_file, "tenant", requests_per_minute=5, max_inflight=2).text
        self._seed_file.write_bytes(bytes(nkeys.encode_seed(bytes(range(32)), nkeys.PREFIX_BYTE_USER)))
        self._logs.write(Place("born", 7))
        self._runs.path.mkdir()
        self._runs.write(Run(1, "toy", pids={"router-1": 1}))
        piece = Piece({"n": (1, 2)}, {"a": np.arange(32, dtype=np.int8)})
        self._shelves.put(self._shelves.key("something"), "layers.0", piece)
        disk = DiskStore(self._disk_folder, _BUDGET, 100, 0.0)
        disk.open()
        for key in disk_keys():
            put(disk, key)
        self._root = write_store(self._store_folder)


@asynccontextmanager
async def stored(folder: Path) -> AsyncIterator[Stored]:
    own = folder / "own"
    own.mkdir()
    yield Stored(own)
