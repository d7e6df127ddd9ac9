"""Sound stored files to begin with, and what spoils them."""

from __future__ import annotations

import json
import struct
from contextlib import suppress
from pathlib import Path
from random import Random
from typing import Any

from loadtest.fuzz.noise import INTEGERS, damaged, leaf, nested, spoiled
from pdbus.caching.disk import DiskStore
from pdbus.caching.entry import Entry
from pdbus.canonical import content_digest
from pdbus.checksum import crc32
from pdbus.param_server.commit import Wish
from pdbus.param_server.store import BlockStore
from pdbus.param_server.transactions import Transactions
from pdbus.weights.layer import Tensor
from pdbus.weights.manifest import Manifest

ENTRIES = 4
HEAD_BYTES = 108
"""Of the fixed part of a record's head."""
_LATER_S = 1e6
_FLOATS = (float("inf"), float("-inf"), float("nan"), 1e300)


def disk_keys() -> list[bytes]:
    return [bytes([at]) * 32 for at in range(ENTRIES)]


def put(disk: DiskStore, key: bytes) -> None:
    value = key * 5
    entry = Entry("kv", key, bytes(32), "tenant", b"made of", value, len(value), 0.0, _LATER_S)
    placed = disk.begin(entry)
    assert placed is not None, "a folder with one small file takes another entry"
    disk.write(placed, value)
    disk.commit(placed)


def write_store(folder: Path) -> bytes:
    """Two packs with a version, whose root is returned, and an open transaction."""
    blocks = [b"a block", b"another block"]
    digests = list(map(content_digest, blocks))
    manifest = Manifest.build(
        [Tensor(f"meta/{at}", "u8", (len(blocks[at]),), (digest,)) for at, digest in enumerate(digests)]
    )
    contents = [*blocks, manifest.encoded, *(layer.encoded for layer in manifest.layers)]
    with BlockStore(folder, "toy") as store:
        for some in (contents[:1], contents[1:]):
            with store.writing() as pack:
                for content in some:
                    pack.add(content_digest(content), memoryview(content))
    Transactions(folder).pin("a", 5, digests)
    Wish(folder, "born").write(manifest.root)
    return manifest.root


def spoil_json(rng: Random, path: Path) -> None:
    content = path.read_bytes()
    whole = json.loads(content)
    for _ in range(rng.randrange(1, 3)):
        whole = spoiled(rng, whole, _fresh)
    with suppress(RecursionError, UnicodeError):  # what Python itself can't write is damage of another sort
        content = json.dumps(whole).encode()
    path.write_bytes(damaged(rng, content) if rng.random() < 0.3 else content)


def _fresh(rng: Random) -> Any:
    return rng.choice(
        (leaf(rng, False), *rng.sample(INTEGERS, 2), rng.choice(_FLOATS), "ab" * 32, 10**400, nested(rng))
    )


def spoiled_record(rng: Random, content: bytes) -> bytes:
    """A record of the disk tier with other fields (caching/segment.py), and the checksum that they have."""
    head, body = bytearray(content[:HEAD_BYTES]), bytearray(content[HEAD_BYTES:])
    for _ in range(rng.randrange(3)):
        at, size = rng.choice(((5, 1), (6, 2), (8, 4), (12, 4), (16, 4), (20, 8), (28, 8), (36, 32), (68, 32)))
        value = rng.choice((*INTEGERS, rng.getrandbits(8 * size))) % (1 << 8 * size)
        head[at : at + size] = value.to_bytes(size, "little")
    if rng.random() < 0.3:
        body[: rng.randrange(4)] = b"\xff"
    tenant_bytes, material_bytes = struct.unpack_from("<HI", head, 6)
    head[4], head[-4:] = 0, bytes(4)
    head[-4:] = struct.pack("<I", crc32(bytes(head) + bytes(body[: tenant_bytes + material_bytes])))
    return bytes(head + body)
