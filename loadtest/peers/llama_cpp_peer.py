"""llama.cpp by its Python binding: Q4_1 as the default file is; Q4_0, Q8_0 and fp32 made from it by its quantiser."""

from __future__ import annotations

import ctypes
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import llama_cpp
import numpy as np

from loadtest.peers.base import Clock, Prompts, Sources, Timing, Unusable, Weights
from loadtest.peers.folder import made_once, quantised, shape

Kind = Literal["q4_1", "q4_0", "q8_0", "f32"]

_FTYPES: dict[Kind, int] = {
    "q4_1": llama_cpp.LLAMA_FTYPE_MOSTLY_Q4_1,
    "q4_0": llama_cpp.LLAMA_FTYPE_MOSTLY_Q4_0,
    "q8_0": llama_cpp.LLAMA_FTYPE_MOSTLY_Q8_0,
    "f32": llama_cpp.LLAMA_FTYPE_ALL_F32,
}
_CHUNK = 512
"""Tokens in one `llama_decode`: its default."""
_KV_BYTES = 2
"""fp16, its default."""


class _LlamaCpp:
    """Its C functions as `llama-bench` calls them: the binding's own loop samples in Python, which would be unfair."""

    def __init__(self, path: Path, sources: Sources, threads: int) -> None:
        self._threads = threads
        self._model = llama_cpp.llama_model_load_from_file(os.fsencode(path), llama_cpp.llama_model_default_params())
        if not self._model:
            raise Unusable(f"it can't load {path.name}")
        self._vocab = llama_cpp.llama_vocab_n_tokens(llama_cpp.llama_model_get_vocab(self._model))
        self.weights = Weights(llama_cpp.llama_model_size(self._model), shape(sources).kv_values * _KV_BYTES)

    def generate(self, prompts: Prompts, new_tokens: int) -> Timing:
        context = self._context(len(prompts), len(prompts[0]) + new_tokens)
        batch = llama_cpp.llama_batch_init(_CHUNK, 0, 1)
        try:
            clock = Clock()
            tokens = self._prefill(context, batch, prompts)
            clock.token()
            made = [tokens[0]]
            for step in range(new_tokens - 1):
                position = len(prompts[0]) + step
                rows = [(token, position, number, True) for number, token in enumerate(tokens)]
                tokens = self._run(context, batch, rows)
                clock.token()
                made.append(tokens[0])
            return clock.timing(made)
        finally:
            llama_cpp.llama_batch_free(batch)
            llama_cpp.llama_free(context)

    def _context(self, sequences: int, length: int) -> llama_cpp.llama_context_p:
        params = llama_cpp.llama_context_default_params()
        params.n_ctx, params.n_seq_max = sequences * (length + 256), sequences
        params.n_batch = params.n_ubatch = _CHUNK
        params.n_threads = params.n_threads_batch = self._threads
        context = llama_cpp.llama_init_from_model(self._model, params)
        if not context:
            raise Unusable(f"it makes no context of {params.n_ctx} tokens")
        return context

    def _prefill(self, context: object, batch: llama_cpp.llama_batch, prompts: Prompts) -> list[int]:
        """One prompt after another, as its server does; the first new token of each."""
        tokens = []
        for number, prompt in enumerate(prompts):
            for start in range(0, len(prompt), _CHUNK):
                part = prompt[start : start + _CHUNK]
                last = start + len(part) == len(prompt)
                rows = [(t, start + i, number, last and i == len(part) - 1) for i, t in enumerate(part)]
                found = self._run(context, batch, rows)
                tokens += found
        return tokens

    def _run(self, context: object, batch: llama_cpp.llama_batch, rows: list[tuple[int, int, int, bool]]) -> list[int]:
        """Rows (token, position, sequence, logits wanted); the best next token of each row that wants logits."""
        batch.n_tokens = len(rows)
        for row, (token, position, sequence, wanted) in enumerate(rows):
            batch.token[row], batch.pos[row], batch.logits[row] = token, position, wanted
            batch.n_seq_id[row], batch.seq_id[row][0] = 1, sequence
        if code := llama_cpp.llama_decode(context, batch):
            raise Unusable(f"llama_decode failed with {code}")
        return [self._best(context, row) for row, (*_, wanted) in enumerate(rows) if wanted]

    def _best(self, context: object, row: int) -> int:
        pointer = llama_cpp.llama_get_logits_ith(context, row)
        logits = np.ctypeslib.as_array(ctypes.cast(pointer, ctypes.POINTER(ctypes.c_float)), (self._vocab,))
        return int(logits.argmax())


@dataclass(frozen=True)
class LlamaCpp:
    kind: Kind

    def prepare(self, sources: Sources) -> Path:
        if sources.gguf is None:
            raise Unusable("its quantiser starts from a GGUF file, which this checkpoint is not")
        if self.kind in sources.gguf.stem.lower():
            return sources.gguf
        source, target = sources.gguf, quantised(sources, self.kind)
        made_once(target.parent, lambda folder: _quantise(source, folder / target.name, self.kind))
        return target

    def open(self, path: Path, sources: Sources, threads: int) -> _LlamaCpp:
        llama_cpp.llama_backend_init()
        return _LlamaCpp(path, sources, threads)


def _quantise(source: Path, target: Path, kind: Kind) -> None:
    params = llama_cpp.llama_model_quantize_default_params()
    # The file is quantised already: what comes out are its very values, as near as the new format holds them.
    params.ftype, params.allow_requantize, params.nthread = _FTYPES[kind], True, 2
    if code := llama_cpp.llama_model_quantize(os.fsencode(source), os.fsencode(target), ctypes.byref(params)):
        raise Unusable(f"its quantiser failed with {code}")
