"""Which pieces of a model stay in memory where not all of them fit: the rest is read as it is computed with.

A step reads every piece of the layers and of the head once, in order, so that all of them gain the same by staying:
those that stay are spread evenly, so that there is time to read a piece while others are computed. Of the embedding
only the rows of the step's tokens are read: it stays last of all. Pieces are mapped files: one that does not stay lies
in the system's page cache, as far as there is room, and not in this process's memory.
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
from typing import Any, TypeAlias

import numpy as np

from pdbus.model.shelf import FileMemory, Piece
from pdbus.settings import SettingsError

Array: TypeAlias = "np.ndarray[Any, Any]"


def spread(count: int, of: int) -> list[int]:
    """`count` of range(of), as evenly apart as can be."""
    return [index * of // count for index in range(count)]


def least_bytes(layers: Sequence[int], head: Sequence[int], embedding: Sequence[int]) -> int:
    """What is in memory at once where nothing stays: a piece and the one before it, and one of the embedding."""
    return 2 * max(*layers, *head) + max(embedding)


class Residency:
    """For all versions of a worker: what stays is of the newest one, also what older ones share with it."""

    def __init__(self, budget_bytes: int) -> None:
        self._budget = budget_bytes
        self._kept: frozenset[FileMemory] = frozenset()

    def check(self, layers: Sequence[int], head: Sequence[int], embedding: Sequence[int]) -> None:
        """Raises SettingsError where a model with pieces of so many bytes can't be computed within the budget."""
        least = least_bytes(layers, head, embedding)
        if self._budget < least:
            raise SettingsError(
                f"PDBUS_WEIGHT_BYTES is {self._budget}; this model needs at least {least}: two layers "
                "and a part of the embedding"
            )

    def adopt(self, layers: Sequence[Piece], head: Sequence[Piece], embedding: Sequence[Piece]) -> None:
        """A version is ready whose pieces are these. Raises as `check`."""
        sizes = [[piece.nbytes for piece in part] for part in (layers, head, embedding)]
        self.check(*sizes)
        room = self._budget - least_bytes(*sizes)
        if sum(map(sum, sizes)) <= self._budget:
            room = self._budget
        kept: set[FileMemory] = set()
        for part in (layers, head, embedding):
            chosen, room = _fitting(part, room)
            kept.update(chosen)
        before, self._kept = self._kept, frozenset(kept)
        for memory in before - kept:
            memory.drop()

    @property
    def kept_bytes(self) -> int:
        return sum(memory.nbytes for memory in self._kept)

    def passed(self, piece: Piece) -> None:
        """It has been computed with."""
        if piece.mapped and piece.mapped not in self._kept:
            piece.mapped.drop()

    def comes(self, piece: Piece) -> None:
        """It will be computed with soon."""
        if piece.mapped and piece.mapped not in self._kept:
            piece.mapped.ahead()

    def walk(self, pieces: Sequence[Piece]) -> Generator[int, None, None]:
        """Their indices in order: each is let go as soon as the next one is asked for."""
        for index, piece in enumerate(pieces):
            if index + 1 < len(pieces):
                self.comes(pieces[index + 1])
            try:
                yield index
            finally:
                self.passed(piece)


def embedded(pieces: tuple[Piece, ...], tokens: Array, residency: Residency) -> Array:
    """Rows [tokens, hidden] of an embedding in pieces, each of which is let go once its rows are copied."""
    first = pieces[0].arrays["rows"]
    found: Array = np.empty((len(tokens), first.shape[1]), first.dtype)
    of_piece = tokens // len(first)
    for index in np.unique(of_piece):
        chosen = of_piece == index
        found[chosen] = pieces[index].arrays["rows"][tokens[chosen] - index * len(first)]
        residency.passed(pieces[index])
    return found


def _fitting(pieces: Sequence[Piece], room: int) -> tuple[list[FileMemory], int]:
    """Of one kind: as many as fit, and the room that they leave."""
    largest = max(piece.nbytes for piece in pieces)
    count = len(pieces) if sum(piece.nbytes for piece in pieces) <= room else room // largest
    chosen = [pieces[index] for index in spread(count, len(pieces))] if count else []
    kept = [piece.mapped for piece in chosen if piece.mapped]
    return kept, room - sum(piece.nbytes for piece in chosen)
