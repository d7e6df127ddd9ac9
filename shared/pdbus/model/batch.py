"""What one forward pass reads: tokens of several sequences, prefill chunks and decode steps mixed. No torch here."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from pdbus.kv.codec import PagePool


@dataclass(frozen=True, slots=True)
class SequenceSlice:
    """The tokens of one sequence in a batch: rows `start` to `start + length`, at positions from `past` on."""

    start: int
    length: int
    past: int
    """Tokens of the sequence whose KV is already in its pages."""
    page_ids: Sequence[int]
    """All its pages in order, with room for past + length tokens. It alone may write to those of the new tokens."""


@dataclass(frozen=True, slots=True)
class Batch:
    """One step. The slices cover all of `tokens` in order, without gaps."""

    tokens: Sequence[int]
    sequences: Sequence[SequenceSlice]
    logit_rows: Sequence[int]
    """Rows of `tokens` whose logits are wanted."""
    first_layer: int = 0
    """Above 0: the step begins with this layer. What enters it is in the tokens' pages, and so are K and V of the
    layers below."""

    def __post_init__(self) -> None:
        end = 0
        for piece in self.sequences:
            if piece.start != end or piece.length < 1 or piece.past < 0:
                raise ValueError(f"a batch of {len(self.tokens)} tokens has the slice {piece} at row {end}")
            end = piece.start + piece.length
        if end != len(self.tokens) or not self.tokens:
            raise ValueError(f"the slices of a batch cover {end} of its {len(self.tokens)} tokens")
        if any(not 0 <= row < end for row in self.logit_rows):
            raise ValueError(f"logits are wanted of a row outside the batch's {end}")

    @classmethod
    def joined(cls, batches: Sequence[Batch]) -> Batch:
        """One after the other in one step; all begin with the same layer."""
        if len(batches) == 1:
            return batches[0]
        tokens: list[int] = []
        sequences: list[SequenceSlice] = []
        logit_rows: list[int] = []
        for batch in batches:
            start = len(tokens)
            sequences += [replace(piece, start=start + piece.start) for piece in batch.sequences]
            logit_rows += [start + row for row in batch.logit_rows]
            tokens += batch.tokens
        return cls(tokens, sequences, logit_rows, batches[0].first_layer)

    @property
    def positions(self) -> list[int]:
        """The position of each token in its own sequence."""
        return [piece.past + step for piece in self.sequences for step in range(piece.length)]


def check_streams(batch: Batch, pool: PagePool) -> None:
    """Raises ValueError where the step would begin with a layer before which the pool keeps nothing."""
    if batch.first_layer and batch.first_layer not in pool.streams.layers:
        raise ValueError(f"what enters layer {batch.first_layer} is not kept in a pool with {pool.streams}")
