"""Bytes with a layout that others send or store: deltas, manifests, log entries, rows, lines, packed values.

Each is grown from a sound one, field by field, so that what looks at the fields is reached, not only the first bytes.
"""

from __future__ import annotations

import json
import struct
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from contextlib import aclosing, asynccontextmanager, suppress
from pathlib import Path
from random import Random
from typing import Any

import msgpack
import numpy as np
import zstandard

from loadtest.fuzz.noise import INTEGERS, Messages, blob, damaged, integer, leaf, message_type, spoiled
from loadtest.fuzz.packing import pack
from pdbus.bus.codec import decode
from pdbus.caching.compression import unpack
from pdbus.canonical import content_digest
from pdbus.errors import PdbusError
from pdbus.kv.format import PageFormat
from pdbus.messages.changelog import Checkpoint, LogEntry
from pdbus.messages.rows import RowsUpdate
from pdbus.messages.updates import BranchEntry
from pdbus.router.jobs.lines import parse, split
from pdbus.router.jobs.states import canonical_body
from pdbus.subjects import all_subjects
from pdbus.weights.branch import Change
from pdbus.weights.checkpointing import checkpoint_of
from pdbus.weights.delta import applied, low_rank, sparse
from pdbus.weights.history import History
from pdbus.weights.layer import Layer, Tensor
from pdbus.weights.manifest import Manifest, root_layers
from pdbus.weights.tables import decoded_update

_BASE = np.arange(64, dtype="<f4").tobytes()
_TENSOR = Tensor("model.layers.0.mlp.up_proj.weight", "fp32", (8, 8), (content_digest(_BASE),))
_NAMES = ("model.layers.0.x", "layers.0", "layers." + "9" * 5000, "model.layers." + "9" * 5000 + ".x", "layers.٣",
          "table.a/sealed/b/c/1", "table.", "meta/..", "", "head")  # fmt: skip
_WHERE = ("run", "rows", "elements")
_REFS = ("stable", "canary", "", "a/b", "x" * 300)
_ROOTS = tuple(content_digest(bytes([number])) for number in range(5))
Form = Callable[[Random], object]


class Forms:
    """Each form raises a PdbusError, or what it says that it raises, for what it refuses."""

    width = 1

    def __init__(self) -> None:
        self._forms: tuple[Form, ...] = (
            self._delta, _packed, self._layer, _root, self._entry, _rows, self._log, _line, _page_format, self._wire,
        )  # fmt: skip
        self._layers = Manifest.build([_TENSOR, Tensor("meta/config.json", "u8", (3,), (content_digest(b"{}"),))])
        self._strict = Messages({})
        self._logs = Messages({str: _REFS, bytes: _ROOTS, int: INTEGERS})
        self._wires = [kind for subject in all_subjects().values() if (kind := message_type(subject)) is not None]

    async def one(self, rng: Random) -> bool:
        try:
            rng.choice(self._forms)(rng)
        except PdbusError:
            return False
        return True

    async def ends(self) -> None:
        """What is sound is read."""
        target = _changed(Random(0))
        delta = sparse(_BASE, target, 4)
        assert delta is not None
        assert applied("sparse", _BASE, delta) == target
        for layer in self._layers.layers:
            assert Layer.decode(layer.encoded) == layer
        assert [name for name, _ in root_layers(self._layers.encoded)] == [layer.name for layer in self._layers.layers]

    def _delta(self, rng: Random) -> None:
        base = rng.choice((_BASE, b"", _BASE[:7]))
        if rng.random() < 0.5:
            width = rng.choice((1, 2, 4))
            body = sparse(_BASE, _changed(rng), width) or b""
            head = struct.pack("<4sBBI", b"pds1", rng.choice((0, 1, 2, 3, 4, 8)), rng.choice((1, 2, 4)), _u32(rng))
        else:
            shape = rng.choice(((8, 1, 8), (64, 2, 1), (0, 3, 0), (1, 1, 64)))
            body = low_rank(np.ones(shape[:2], np.float32), np.ones(shape[1:], np.float32))
            head = struct.pack("<4sIII", b"pdl1", _u32(rng), _u32(rng), _u32(rng))
        if rng.random() < 0.5:
            body = head + body[len(head) :]
        applied(rng.choice(("sparse", "low_rank")), base, damaged(rng, body) if rng.random() < 0.5 else body)

    def _layer(self, rng: Random) -> None:
        content = rng.choice(self._layers.layers).encoded
        Layer.decode(damaged(rng, content) if rng.random() < 0.3 else _repacked(rng, content))

    def _entry(self, rng: Random) -> None:
        count = rng.randrange(4)
        at = np.array([rng.choice((0, 7, 63, *INTEGERS)) % (1 << 64) for _ in range(count)], "<u8").tobytes()
        values = np.ones(rng.choice((count, 8 * count, 64, 65)), "<f4").tobytes()
        entry: dict[str, Any] = {"tensor": _TENSOR.name, "how": rng.choice(("set", "add")), "where": rng.choice(_WHERE)}
        entry |= {"at": at + blob(rng)[: rng.choice((0, 0, 3))], "values": values}
        Change(_good(entry, BranchEntry), _TENSOR).apply({0: np.zeros(64, np.float32)})

    def _log(self, rng: Random) -> None:
        """A change log of good form that means anything: no reader may fail at it, since all have to read it."""
        history, now = History(), 0
        for seq in range(1, rng.randrange(2, 30)):
            now += rng.choice((0, 1, 10**9, 10**13, -(10**9)))
            history.apply(seq, now, _good(self._logs.of(rng, LogEntry), LogEntry))
            _ = history.wanted, history.refs, history.conversions.due(history.heads, history.live)
        made = checkpoint_of(history, "born", commits=rng.choice((0, 2, 128)))
        assert set(History.restored(made).wanted) == set(history.wanted)
        restored = History.restored(_good(self._logs.of(rng, Checkpoint), Checkpoint))
        restored.apply(restored.seq + 1, now, _good(self._logs.of(rng, LogEntry), LogEntry))

    def _wire(self, rng: Random) -> None:
        kind = rng.choice(self._wires)
        whole = self._strict.of(rng, kind)
        decode(kind, damaged(rng, pack(whole)) if rng.random() < 0.3 else pack(spoiled(rng, whole, leaf)))


def _good(tree: Any, kind: type[Any]) -> Any:
    """Raises InvalidRequest where it has no form on the wire."""
    return decode(kind, pack(tree))


def _changed(rng: Random) -> bytes:
    block = np.frombuffer(_BASE, "<f4").copy()
    block[rng.randrange(64)] = rng.random()
    return block.tobytes()


def _u32(rng: Random) -> int:
    return rng.choice((0, 1, 2, 8, 64, integer(rng))) % (1 << 32)


def _packed(rng: Random) -> None:
    """zstd: frames that tell another size or none, several, cut ones, and some that grow a thousandfold."""
    content = blob(rng) * rng.choice((1, 100, 2_000))
    tells = rng.random() < 0.5
    frame = zstandard.ZstdCompressor(level=1, write_content_size=tells).compress(content)
    frame += frame if rng.random() < 0.1 else b""
    size = rng.choice((len(content), len(content), len(content) - 1, len(content) + 1, 0, -1, 1 << 20))
    with suppress(ValueError):
        assert len(unpack(damaged(rng, frame) if rng.random() < 0.3 else frame, size)) == size


def _root(rng: Random) -> None:
    layers = [["embed", _ROOTS[0]], ["layers.0", _ROOTS[1]], ["meta", _ROOTS[2]], ["table.a", _ROOTS[3]]]
    root_layers(_repacked(rng, pack(["pdbus-root-1", layers])))


def _repacked(rng: Random, content: bytes) -> bytes:
    def fresh(r: Random) -> Any:
        return r.choice((leaf(r), *_NAMES, r.choice(_ROOTS), [r.choice(_NAMES), r.choice(_ROOTS)]))

    whole = msgpack.unpackb(content)
    for _ in range(rng.randrange(3)):
        whole = spoiled(rng, whole, fresh)
    return pack(whole)


def _rows(rng: Random) -> None:
    ids = np.array([rng.choice((0, 1, 99, 100, (1 << 64) - 1)) for _ in range(rng.randrange(4))], "<u8").tobytes()
    values = np.ones(rng.choice((len(ids) // 2, 16, 0)), "<f4").tobytes() + blob(rng)[: rng.choice((0, 0, 3))]
    decoded_update(RowsUpdate(damaged(rng, ids) if rng.random() < 0.2 else ids, values), 100, 4)


def _line(rng: Random) -> None:
    """Of a batch's file, in pieces."""
    content, body = batch_file(rng)
    cut = rng.randrange(len(content) + 1)

    async def pieces() -> AsyncGenerator[bytes, None]:
        yield content[:cut]
        yield content[cut:]

    async def read() -> None:
        # Closed here, where they would otherwise wait for a turn of the loop, which no input of this kind gives it
        async with aclosing(pieces()) as source, aclosing(split(source)) as lines:
            async for number, found in lines:
                parse(number, found, "chat.completions")

    # No loop of its own: nothing in it waits for anything
    with suppress(StopIteration):
        read().send(None)
    with suppress(ValueError, RecursionError):
        canonical_body(body if isinstance(body, dict) else {"x": body})


def batch_file(rng: Random) -> tuple[bytes, Any]:
    """Two lines, and the body of the first request."""
    body = spoiled(rng, {"model": "toy", "messages": [{"role": "user", "content": "x"}]}, lambda r: leaf(r, False))
    whole = {"custom_id": "1", "method": "POST", "url": "/v1/chat/completions", "body": body}
    line = json.dumps(spoiled(rng, whole, lambda r: leaf(r, False)) if rng.random() < 0.5 else whole).encode()
    content = line + rng.choice((b"", b"\n", b"\n\n \n")) + (damaged(rng, line) if rng.random() < 0.7 else line)
    return content, body


def _page_format(rng: Random) -> None:
    text = "kv1-l2-t16-h1-d4-" + rng.choice(("fp32", "int8", "fp16", "int8-g3"))
    PageFormat.parse(damaged(rng, text.encode()).decode("utf-8", "replace"))


@asynccontextmanager
async def forms(_: Path) -> AsyncIterator[Forms]:
    yield Forms()
