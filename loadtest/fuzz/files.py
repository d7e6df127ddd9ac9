"""Files of models: each input is one damaged file, opened, read whole, and used as a router uses it."""

from __future__ import annotations

import copy
import json
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from random import Random
from typing import Any

from loadtest.fuzz import seeds
from loadtest.fuzz.gguf_seeds import FORMATS, gguf, gguf_bytes
from loadtest.fuzz.noise import INTEGERS, blob, damaged, integer, leaf, nested, spoiled, text, tree
from loadtest.fuzz.templates import template
from loadtest.fuzz.use import Passing, serve, use
from pdbus.model.pretokenizer import CUTS

_OPTIONAL = ("expert_count", "attention.sliding_window", "attention.value_length", "rope.dimension_count",
             "rope.scaling.type", "rope.scaling.factor", "attention.head_count_kv")  # fmt: skip
_OPTIONAL_TOO = ("split.count", "tokenizer.ggml.add_eos_token", "tokenizer.ggml.add_bos_token", "general.alignment",
                 "tokenizer.ggml.eot_token_id", "tokenizer.ggml.eom_token_id")  # fmt: skip
"""Metadata that no sound file here has."""


class Files(ABC):
    """What the three kinds share: folders with a sound model each, of which an input spoils one file."""

    width = 1

    def __init__(self, folder: Path, thread: Passing) -> None:
        self._thread = thread
        self._models = {name: seeds.model(name) for name in seeds.CONFIGS}
        self._folder = folder
        for name in self._models:
            (folder / name).mkdir()
        self._write()

    def _write(self) -> None:
        for name, model in self._models.items():
            model.write(self._folder / name)

    async def one(self, rng: Random) -> bool:
        return await self._thread.do(partial(self._one, rng))

    @abstractmethod
    def _one(self, rng: Random) -> bool: ...

    async def ends(self) -> None:
        """The sound models still open."""
        self._write()
        for name in self._models:
            assert use(self._folder / name), f"a sound {name} model is refused"

    def _spoiled(self, path: Path, content: bytes) -> bool:
        """Whether the folder is still accepted with that in that file, which is sound again thereafter."""
        sound = path.read_bytes()
        path.write_bytes(content)
        try:
            return use(self._folder / path.relative_to(self._folder).parts[0])
        finally:
            path.write_bytes(sound)


class Gguf(Files):
    def __init__(self, folder: Path, thread: Passing) -> None:
        super().__init__(folder, thread)
        self._path = folder / "model.gguf"
        self._files = [gguf(name) for name in FORMATS]

    def _one(self, rng: Random) -> bool:
        self._path.write_bytes(self._content(rng))
        return use(self._path)

    async def ends(self) -> None:
        for sound in self._files:
            self._path.write_bytes(sound.content)
            assert use(self._path), f"a sound file is refused: {sound.metadata['general.architecture']}"

    def _content(self, rng: Random) -> bytes:
        sound = rng.choice(self._files)
        if rng.random() < 0.3:
            return damaged(rng, sound.content)
        metadata, tensors = copy.deepcopy((sound.metadata, sound.tensors))
        for _ in range(rng.randrange(1, 3)):
            kind = rng.random()
            if kind < 0.25:  # what the reader looks at by name, with what another file or nobody would say there
                metadata[rng.choice(self._names(rng))] = self._value(rng)
            elif kind < 0.6:
                metadata = _object(spoiled(rng, metadata, leaf))
            else:
                _spoil_tensor(rng, tensors)
        whole = gguf_bytes(metadata, tensors, rng.choice((3, 3, 3, 3, 3, 3, 2, 2, 1, 4, 0x03000000)))
        return damaged(rng, whole) if rng.random() < 0.15 else whole

    def _names(self, rng: Random) -> list[str]:
        architecture = rng.choice(self._files).metadata["general.architecture"]
        return [*rng.choice(self._files).metadata, *(f"{architecture}.{name}" for name in _OPTIONAL), *_OPTIONAL_TOO]

    def _value(self, rng: Random) -> Any:
        if rng.random() < 0.5:
            return rng.choice(list(rng.choice(self._files).metadata.values()))
        return rng.choice((leaf(rng, False), True, rng.choice(list(CUTS)), [1.5, float("nan")], [0] * 300))


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
    def _one(self, rng: Random) -> bool:
        name = rng.choice(list(self._models))
        model = self._models[name]
        if seeds.INDEX in model.files and rng.random() < 0.3:
            index = self._folder / name / seeds.INDEX
            return self._spoiled(index, _spoiled_json(rng, model.files[seeds.INDEX]))
        file, shard = rng.choice(list(model.shards.items()))
        return self._spoiled(self._folder / name / file, self._content(rng, *shard))

    def _content(self, rng: Random, header: Any, data: bytes) -> bytes:
        if rng.random() < 0.3:
            return damaged(rng, seeds.safetensors_bytes(header, data))
        if rng.random() < 0.3:  # in itself a sound file, of other tensors than the model has
            return seeds.safetensors_bytes(*_otherwise(rng, header, data))
        for _ in range(rng.randrange(1, 3)):
            header = spoiled(rng, header, lambda r: r.choice((leaf(r, False), "BF16", "F16", "I64", "F8_E4M3", "BOOL")))
        data = data if rng.random() < 0.8 else damaged(rng, data)
        return seeds.safetensors_bytes(header, data, rng.choice(INTEGERS) if rng.random() < 0.1 else None)


def _otherwise(rng: Random, header: dict[str, Any], data: bytes) -> tuple[dict[str, Any], bytes]:
    """A tensor renamed, gone, new, or of another shape or format, with ranges that still fill the file."""
    header = copy.deepcopy(header)
    name = rng.choice([key for key in header if key != "__metadata__"])
    entry = header.pop(name)
    first, end = entry["data_offsets"]
    match rng.randrange(4):
        case 0:
            header[rng.choice((text(rng), "embeddings.position_ids", "lm_head.weight", name))] = entry
        case 1:
            header[name] = entry | {"shape": [(end - first) // 2], "dtype": rng.choice(("F16", "BF16", "I16"))}
        case 2:
            header[name] = entry | {"shape": rng.choice(([1, *entry["shape"]], entry["shape"][::-1]))}
        case _:
            header[name] = entry
            extra, at = blob(rng), len(data)
            dtype = rng.choice(("U8", "I8", "BOOL", "F8_E4M3"))
            header[text(rng)] = {"dtype": dtype, "shape": [len(extra)], "data_offsets": [at, at + len(extra)]}
            data += extra
    return header, data


class Meta(Files):
    """config.json, tokenizer.json and their like, and the chat template."""

    def _one(self, rng: Random) -> bool:
        name = rng.choice(list(self._models))
        model = self._models[name]
        file = rng.choice((*model.files, *(set(model.files) & {"tokenizer.json", "chat_template.jinja"})))
        if file.endswith(".jinja") and rng.random() < 0.7:
            content = template(rng)
        else:
            content = _spoiled_json(rng, model.files[file], self._models[rng.choice(list(self._models))].files)
        if file in model.meta and rng.random() < 0.4:  # as a version that somebody pushed: nothing has looked at it yet
            return serve(model.meta | {file: content})
        return self._spoiled(self._folder / name / file, content)


def _spoiled_json(rng: Random, sound: bytes, others: Mapping[str, bytes] | None = None) -> bytes:
    """`others`: files of another model, whose fields may come in."""
    try:
        whole = json.loads(sound)
    except ValueError:
        return damaged(rng, sound)
    if rng.random() < 0.3:
        return damaged(rng, sound)
    pieces = [json.loads(content) for name, content in (others or {}).items() if name.endswith(".json")]

    def fresh(r: Random) -> Any:
        if pieces and r.random() < 0.4:
            piece = r.choice(pieces)
            return r.choice(list(piece.values())) if isinstance(piece, dict) and piece else piece
        return nested(r) if r.random() < 0.03 else tree(r, False, 2)

    for _ in range(rng.randrange(1, 4)):
        if isinstance(whole, dict) and pieces and rng.random() < 0.2:
            donor = rng.choice(pieces)
            key = rng.choice(list(donor)) if isinstance(donor, dict) and donor else "model_type"
            whole = whole | {key: donor[key] if isinstance(donor, dict) and key in donor else fresh(rng)}
        else:
            whole = spoiled(rng, whole, fresh)
    return json.dumps(whole).encode()


def _object(value: Any) -> dict[str, Any]:
    return value if isinstance(value, dict) else {}


@asynccontextmanager
async def gguf_files(folder: Path) -> AsyncIterator[Gguf]:
    with Passing() as thread:
        yield Gguf(folder, thread)


@asynccontextmanager
async def safetensors(folder: Path) -> AsyncIterator[Safetensors]:
    with Passing() as thread:
        yield Safetensors(folder, thread)


@asynccontextmanager
async def meta(folder: Path) -> AsyncIterator[Meta]:
    with Passing() as thread:
        yield Meta(folder, thread)
