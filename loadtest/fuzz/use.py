"""A checkpoint opened, read whole, and used as a router uses it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Self

from pdbus.errors import InvalidRequest, PdbusError
from pdbus.model.checkpoint import open_checkpoint
from pdbus.router.detokenizer import Detokenizer
from pdbus.router.encoder_version import EncoderVersion
from pdbus.router.openai_schema import ChatMessage
from pdbus.router.version import build_version

_ROOT = bytes(32)
_EACH = 256
_FOREIGN_IDS = (0, 1, 255, 4, 1 << 22)
_SAID = ("", "Hello, world", "ä😀 \0 <|im_end|>")


class Passing:
    """A thread for what is done, and another one after some time: for every tokenizer that was used in a thread the
    library keeps a cache until the thread ends, and here each input is another tokenizer."""

    def __init__(self) -> None:
        self._threads = ThreadPoolExecutor(1)
        self._done = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._threads.shutdown()

    async def do(self, work: Callable[[], bool]) -> bool:
        self._done += 1
        if not self._done % _EACH:
            self._threads.shutdown(wait=False)
            self._threads = ThreadPoolExecutor(1)
        return await asyncio.get_running_loop().run_in_executor(self._threads, work)


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
            version.tokenizer.encode(_SAID)
            return True
        for said in _SAID:
            ids = version.tokenizer.encode(said, special=True)
            version.tokenizer.decode(ids)
            stream = Detokenizer(version.tokenizer.bytes)
            for each in (*ids, *_FOREIGN_IDS):
                stream.add(each)
            stream.flush()
        if isinstance(version.template, InvalidRequest):
            return False
        version.template.render([ChatMessage(role, said) for role in ("system", "user", "assistant") for said in _SAID])
    except PdbusError:
        return False
    return True
