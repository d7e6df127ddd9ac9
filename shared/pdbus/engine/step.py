"""One forward pass over chunks of sequences, and the tokens sampled from it."""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Many
from itertools import groupby

import numpy as np

from pdbus.engine.chunks import Chunk
from pdbus.engine.sequence import Ended, Produced, Sequence
from pdbus.errors import PdbusError
from pdbus.kv.codec import PagePool
from pdbus.model.backend import Model
from pdbus.model.batch import Batch, SequenceSlice
from pdbus.model.candidates import Logits
from pdbus.model.sampler import best_of, token_logprob


class Abandoned(Exception):
    """Raised by `on_layer` to leave a pass in its middle."""


def compute(pool: PagePool, chunks: Many[Chunk], on_layer: Callable[[int], None] | None) -> list[Produced | Ended]:
    """Computes the chunks, whose KV is in the pool afterwards, and samples for those that reach their sequence's end.
    Those of a version are neighbours, all versions are of one kind (Model.kind), and all begin with the same layer.

    Returns what each of those produced, or why it failed. Counts nothing as computed: that is the scheduler's."""
    rows = [_logit_rows(chunk) for chunk in chunks]
    (model, batch), *beside = _parts(chunks, rows)
    logits = model.forward(batch, pool, on_layer, beside=beside)  # [logit rows, vocab]
    best = best_of(logits)
    outcomes: list[Produced | Ended] = []
    start = 0
    for chunk, wanted in zip(chunks, rows, strict=True):
        own = logits[start : start + len(wanted)]
        start += len(wanted)
        _note_prompt_logprobs(chunk, own)
        if chunk.last:
            outcomes.append(_next_token(chunk.sequence, own[-1], int(best[start - 1])))
    return outcomes


def _logit_rows(chunk: Chunk) -> list[int]:
    """Rows of the chunk whose logits are wanted: the last one to sample from, and all that predict a prompt token."""
    sequence = chunk.sequence
    last = [chunk.tokens - 1] if chunk.last else []
    return sorted({*range(_predicting(chunk)), *last}) if sequence.wants_prompt_logprobs else last


def _predicting(chunk: Chunk) -> int:
    """Rows from the first on whose next token belongs to the prompt."""
    return min(max(len(chunk.sequence.ticket.prompt) - 1 - chunk.sequence.computed, 0), chunk.tokens)


def _parts(chunks: Many[Chunk], rows: Many[Many[int]]) -> list[tuple[Model, Batch]]:
    """What is to be computed of each version."""
    pairs = groupby(zip(chunks, rows, strict=True), lambda pair: pair[0].sequence.version)
    return [(version.model, _batch(*zip(*own, strict=True))) for version, own in pairs]


def _batch(chunks: Many[Chunk], rows: Many[Many[int]]) -> Batch:
    tokens: list[int] = []
    slices: list[SequenceSlice] = []
    logit_rows: list[int] = []
    for chunk, wanted in zip(chunks, rows, strict=True):
        sequence, start = chunk.sequence, len(tokens)
        slices.append(SequenceSlice(start, chunk.tokens, sequence.computed, sequence.hold.pages))
        tokens += sequence.tokens[sequence.computed : sequence.computed + chunk.tokens]
        logit_rows += [start + row for row in wanted]
    return Batch(tokens, slices, logit_rows, chunks[0].first_layer)


def _note_prompt_logprobs(chunk: Chunk, logits: np.ndarray) -> None:
    sequence = chunk.sequence
    top = sequence.ticket.prompt_logprobs
    if top is None or not sequence.wants_prompt_logprobs:
        return
    for row in range(_predicting(chunk)):
        token = sequence.ticket.prompt[sequence.computed + row + 1]
        sequence.prompt_logprobs.append(token_logprob(logits[row], token, top))


def _next_token(sequence: Sequence, logits: Logits, best: int) -> Produced | Ended:
    index = sequence.output_index
    prompt_logprobs = tuple(sequence.prompt_logprobs) if sequence.wants_prompt_logprobs else None
    if index >= sequence.ticket.max_tokens:  # only the prompt's log-probabilities are wanted
        return Produced(sequence, index, (), finish="length", prompt_logprobs=prompt_logprobs)
    try:
        sampled = sequence.sampler.choose(logits, best)
    except PdbusError as error:
        return Ended(sequence, error)
    finish = sequence.append(sampled.id)
    if finish == "stop":
        return Produced(sequence, index, (), finish=finish, prompt_logprobs=prompt_logprobs)
    logprobs = (sampled.logprob,) if sampled.logprob else ()
    return Produced(sequence, index, (sampled.id,), logprobs, finish, prompt_logprobs)
