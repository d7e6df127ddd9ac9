"""Embeddings of many texts: asked for in pieces that fit into messages, all of the version of the first."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from pdbus.errors import Corrupt, InvalidRequest
from pdbus.messages.common import Digest
from pdbus.messages.router import EmbedReply, EmbedRequest

_INPUTS_AT_ONCE = 128
_BYTES_AT_ONCE = 256 << 10
_AT_ONCE = 4
_ID_BYTES = 5


@dataclass(frozen=True)
class Embeddings:
    vectors: npt.NDArray[np.float32]
    """[inputs, dimensions]"""
    root: Digest
    """The version that all of them are of."""
    tokens: int
    hits: int
    """Inputs that came from the cache."""


async def embed_all(
    ask: Callable[[EmbedRequest], Awaitable[EmbedReply]],
    inputs: Sequence[str | Sequence[int]],
    ref: str | None,
    cache_control: str,
    session: str | None,
) -> Embeddings:
    """Raises what `ask` does, and InvalidRequest without inputs."""
    if not inputs:
        raise InvalidRequest("there is no input", param="input")
    first, *rest = _pieces([text if isinstance(text, str) else tuple(text) for text in inputs])
    replies = [await ask(EmbedRequest(first, ref, cache_control, session))]
    root = replies[0].root
    at_once = asyncio.Semaphore(_AT_ONCE)

    async def further(piece: tuple[str | tuple[int, ...], ...]) -> EmbedReply:
        async with at_once:
            return await ask(EmbedRequest(piece, root.hex(), cache_control))

    try:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(further(piece)) for piece in rest]
    except ExceptionGroup as failed:
        raise failed.exceptions[0] from None
    replies += [task.result() for task in tasks]
    if any(reply.root != root for reply in replies):
        raise Corrupt("the vectors are of several versions")
    vectors = np.frombuffer(b"".join(reply.vectors for reply in replies), "<f4").reshape(len(inputs), -1)
    return Embeddings(vectors, root, sum(reply.tokens for reply in replies), sum(reply.hits for reply in replies))


def _pieces(inputs: Sequence[str | tuple[int, ...]]) -> Iterator[tuple[str | tuple[int, ...], ...]]:
    piece: list[str | tuple[int, ...]] = []
    size = 0
    for text in inputs:
        more = len(text.encode("utf-8", "surrogatepass")) if isinstance(text, str) else _ID_BYTES * len(text)
        if piece and (len(piece) >= _INPUTS_AT_ONCE or size + more > _BYTES_AT_ONCE):
            yield tuple(piece)
            piece, size = [], 0
        piece.append(text)
        size += more
    yield tuple(piece)
