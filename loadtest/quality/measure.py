"""Perplexity and top-1 of the native engine on fixed texts, token by token."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import tokenizers

from pdbus.kv.format import KvDtype
from pdbus.model.backends import BackendOptions, open_backend
from pdbus.model.batch import Batch, SequenceSlice
from pdbus.model.checkpoint import Checkpoint
from pdbus.model.families import writing
from pdbus.model.native_backend import Precision
from pdbus.model.native_llama import NativeLlama
from pdbus.model.native_pool import NativePool

Array: TypeAlias = "np.ndarray[Any, Any]"

_CHUNK_TOKENS = 512
"""Also how many rows of logits are held at once."""


@dataclass(frozen=True)
class Reading:
    """What one precision makes of the texts: each array has an entry for every token but the first of its text."""

    precision: Precision
    kv_dtype: KvDtype
    losses: Array
    """Negative log-likelihood of the token, in nats."""
    best: Array
    """The token that greedy decoding would have taken in its place."""


def texts(checkpoint: Checkpoint, files: Sequence[Path], window_tokens: int) -> list[list[int]]:
    """Token ids of each file, cut into windows that are read apart."""
    tokenizer = tokenizers.Tokenizer.from_str(checkpoint.meta["tokenizer.json"].decode())
    whole = [tokenizer.encode(file.read_text(), add_special_tokens=False).ids for file in files]
    window = min(window_tokens, writing(checkpoint.config).max_positions)
    cut = [ids[at : at + window] for ids in whole for at in range(0, len(ids), window)]
    return [ids for ids in cut if len(ids) > 1]


def readings(
    checkpoint: Checkpoint,
    windows: Sequence[Sequence[int]],
    precisions: Sequence[Precision],
    kv_dtypes: Sequence[KvDtype],
    threads: int,
) -> Iterator[Reading]:
    """One reading for each pair. Raises InvalidRequest where the native engine can't serve here."""
    config = writing(checkpoint.config)
    for precision in precisions:
        backend = open_backend(BackendOptions("native", precision, threads=threads), config)
        try:
            model = backend.build(config, {}, dict(checkpoint.tensors()), None)
            assert isinstance(model, NativeLlama), "it was asked for"
            for kv_dtype in kv_dtypes:
                parts = [part for window in windows for part in _read(model, kv_dtype, window)]
                losses, best = (np.concatenate(column) for column in zip(*parts, strict=True))
                yield Reading(precision, kv_dtype, losses, best)
        finally:
            backend.close()


def _read(model: NativeLlama, kv_dtype: KvDtype, window: Sequence[int]) -> Iterator[tuple[Array, Array]]:
    """(losses, best) of each chunk."""
    page_format = model.page_format(kv_dtype)
    pages = range(page_format.pages_for(len(window)))
    pool = NativePool(page_format, len(pages))
    for past in range(0, len(window) - 1, _CHUNK_TOKENS):
        chunk = window[past : min(past + _CHUNK_TOKENS, len(window) - 1)]  # nothing comes after the last token
        piece = SequenceSlice(0, len(chunk), past, pages)
        logits = model.forward(Batch(chunk, [piece], range(len(chunk))), pool)
        wanted = logits[np.arange(len(chunk)), window[past + 1 : past + 1 + len(chunk)]]
        peak = logits.max(1, keepdims=True)
        logits -= peak
        sums = np.exp(logits).sum(1, dtype=np.float64)
        yield np.log(sums) + peak[:, 0] - wanted, logits.argmax(1)
