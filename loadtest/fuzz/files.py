"""Files of models: each input is one damaged file, opened, read whole, and used as a router uses it."""

from __future__ import annotations

import copy
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from random import Random
from typing import Any

from loadtest.fuzz import seeds
from loadtest.fuzz.noise import INTEGERS, damaged, integer, leaf, nested, spoiled, text, tree
from loadtest.fuzz.templates import template
from pdbus.errors import InvalidRequest, PdbusError
from pdbus.model.checkpoint import open_checkpoint
from pdbus.router.encoder_version import EncoderVersion
from pdbus.router.openai_schema import ChatMessage
from pdbus.router.version import build_version

_ROOT = bytes(32)
_SAID = ("", "Hello, world", "ä😀 \0 <|im_end|>")


class Files:
    """What the three kinds share: a folder with a sound model, of which an input spoils one file."""

    width = 1

    def __init__(self, folder: Path) -> None:
        self._folder = seeds.write_folder(folder / "model")

    async def ends(self) -> None:
        """The sound model still opens."""
        assert use(seeds.write_folder(self._folder)), "a sound model is refused"


class Gguf(Files):
    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self._path = folder / "model.gguf"
        self._parts = seeds.gguf_parts()
        self._sound = seeds.gguf_bytes(*self._parts)

    async def one(self, rng: Random) -> bool:
        self._path.write_bytes(self._content(rng))
        return use(self._path)

    async def ends(self) -> None:
        self._path.write_bytes(self._sound)
        assert use(self._path), "a sound file is refused"

    def _content(self, rng: Random) -> bytes:
        if rng.random() < 0.4:
            return damaged(rng, self._sound)
        metadata, tensors = copy.deepcopy(self._parts)
        for _ in range(rng.randrange(1, 3)):
            if rng.random() < 0.6:
                metadata = _object(spoiled(rng, metadata, leaf))
            else:
                _spoil_tensor(rng, tensors)
        whole = seeds.gguf_bytes(metadata, tensors, rng.choice((3, 3, 3, 3, 2, 1, 4, 0x03000000)))
        return damaged(rng, whole) if rng.random() < 0.2 else whole


def _spoil_tensor(rng: Random, tensors: dict[str, list[Any]]) -> None:
    if not tensors:
        return
    name = rng.choice(list(tensors))
    shape, format, offset, content = tensors[name]
    match rng.randrange(6):
        case 0:
            del tensors[name]
        case 1:
            tensors[text(rng)] = tensors.pop(name)
        case 2:
            shape = [rng.choice((integer(rng), *shape)) for _ in range(rng.choice((0, 1, 2, 2, 3, 4, 5)))]
            tensors[name] = [shape, format, offset, content]
        case 3:
            tensors[name] = [shape, rng.choice((*range(42), 1 << 31)), offset, content]
        case 4:
            tensors[name] = [shape, format, rng.choice((offset + 32, offset - 32, offset + 1, *INTEGERS)), content]
        case _:
            tensors[name] = [shape, format, offset, damaged(rng, content)]


class Safetensors(Files):
    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self._header, self._data = seeds.safetensors_parts()
        self._path = self._folder / "model.safetensors"

    async def one(self, rng: Random) -> bool:
        self._path.write_bytes(self._content(rng))
        return use(self._folder)

    def _content(self, rng: Random) -> bytes:
        if rng.random() < 0.4:
            return damaged(rng, seeds.safetensors_bytes(self._header, self._data))
        header: Any = self._header
        for _ in range(rng.randrange(1, 3)):
            header = spoiled(rng, header, lambda r: r.choice((leaf(r, False), "BF16", "F16", "I64", "F8_E4M3", "BOOL")))
        data = self._data if rng.random() < 0.8 else damaged(rng, self._data)
        return seeds.safetensors_bytes(header, data, rng.choice(INTEGERS) if rng.random() < 0.1 else None)


class Meta(Files):
    """config.json, tokenizer.json and their like, and the chat template."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self._files = seeds.folder_files()
        index = {"weight_map": dict.fromkeys(seeds.weights(), "model.safetensors")}
        self._extra = {"model.safetensors.index.json": json.dumps(index).encode()}

    async def one(self, rng: Random) -> bool:
        name = rng.choice((*self._files, "tokenizer.json", "chat_template.jinja", *self._extra))
        sound = self._files.get(name) or self._extra[name]
        content = template(rng) if name.endswith(".jinja") and rng.random() < 0.7 else _spoiled_json(rng, sound)
        if rng.random() < 0.4:  # as a version that somebody pushed, and that nothing has looked at before
            return serve(self._files | {name: content})
        path = self._folder / name
        path.write_bytes(content)
        try:
            return use(self._folder)
        finally:
            if name in self._extra:
                path.unlink()
            else:
                path.write_bytes(sound)


def _spoiled_json(rng: Random, sound: bytes) -> bytes:
    try:
        whole = json.loads(sound)
    except ValueError:
        return damaged(rng, sound)
    if rng.random() < 0.3:
        return damaged(rng, sound)
    for _ in range(rng.randrange(1, 4)):
        whole = spoiled(rng, whole, lambda r: nested(r) if r.random() < 0.03 else tree(r, False, 2))
    return json.dumps(whole).encode()


def use(path: Path) -> bool:
    """Opens a checkpoint, reads all of it and serves from it. False where it is refused."""
    try:
        checkpoint = open_checkpoint(path)
        for _ in checkpoint.tensors():
            pass
    except PdbusError:
        return False
    return serve(dict(checkpoint.meta))


def serve(meta: dict[str, bytes]) -> bool:
    """What a router does with a version's files."""
    try:
        version = build_version(_ROOT, meta, {})
        if isinstance(version, EncoderVersion):
            return True
        for said in _SAID:
            ids = version.tokenizer.encode(said, special=True)
            version.tokenizer.decode(ids)
            for each in ids:
                version.tokenizer.bytes.whole(each)
        if isinstance(version.template, InvalidRequest):
            return False
        version.template.render([ChatMessage(role, said) for role in ("system", "user", "assistant") for said in _SAID])
    except PdbusError:
        return False
    return True


def _object(value: Any) -> dict[str, Any]:
    return value if isinstance(value, dict) else {}


@asynccontextmanager
async def gguf(folder: Path) -> AsyncIterator[Gguf]:
    yield Gguf(folder)


@asynccontextmanager
async def safetensors(folder: Path) -> AsyncIterator[Safetensors]:
    yield Safetensors(folder)


@asynccontextmanager
async def meta(folder: Path) -> AsyncIterator[Meta]:
    yield Meta(folder)
