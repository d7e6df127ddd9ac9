"""The compiled library as Python sees it: an engine that owns threads and scratch, and takes what abi.py declares."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from ctypes import POINTER, c_int32, c_void_p
from pathlib import Path
from types import TracebackType

import numpy as np

from pdbus.native.abi import (
    Array,
    BatchStruct,
    LinearStruct,
    ModelStruct,
    OnLayer,
    PartStruct,
    PoolStruct,
    address,
)
from pdbus.native.build import Level, NativeUnavailable, compiled, levels
from pdbus.native.cores import Cell

SPINS = 20_000
"""How often a helper looks for work before it sleeps: some 0.2 ms, longer than any gap within a step."""


class NativeEngine:
    """Threads and scratch memory for one caller at a time. A context manager: leaving it ends the threads."""

    def __init__(
        self, threads: int, level: Level | None = None, folder: Path | None = None, cores: Path | None = None
    ) -> None:
        """Compiles the library on first use on this machine. Raises NativeUnavailable with the reason.

        `threads`: of each step. With `cores`, a ledger (native/cores.py), as many as this engine's share is then."""
        best = next(iter(levels()), None)
        if best is None or (level is not None and level not in levels()):
            raise NativeUnavailable(f"this processor has not what the kernels need ({level or 'AVX2, FMA and F16C'})")
        self.level: Level = level or best
        path = compiled(self.level, folder)
        try:
            self._library = _declare(ctypes.CDLL(str(path)))
        except OSError as error:
            raise NativeUnavailable(f"{path} cannot be loaded: {error}") from error
        self._cell = Cell(cores) if cores else None
        if self._cell:
            threads = self._cell.cores
        ledger = (self._cell.address, self._cell.number) if self._cell else (None, 0)
        self._handle = self._library.pd_engine_create(threads, SPINS, *ledger)
        if not self._handle:
            self._leave()
            raise NativeUnavailable(f"no {threads} threads could be started")

    def __enter__(self) -> NativeEngine:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Ends the threads. No call may be running; calling it twice is fine."""
        handle, self._handle = self._handle, None
        if handle:
            self._library.pd_engine_destroy(handle)
            self._leave()

    def _leave(self) -> None:
        if self._cell:
            self._cell.close()

    def forward(
        self,
        parts: Sequence[PartStruct],
        pool: PoolStruct,
        batch: BatchStruct,
        logits: Array,
        greedy: Array | None = None,
        on_layer: Callable[[int], None] | None = None,
    ) -> None:
        """One step; releases the GIL. logits fp32 [logit rows, vocabulary]; greedy int32 [logit rows].

        `parts`: the versions that it is of, in the order of their rows; all of the same shapes and settings.

        What `on_layer` raises ends the step in its middle, and is raised here."""
        failures: list[BaseException] = []

        def guarded(layer: int) -> int:
            try:
                if on_layer:
                    on_layer(layer)
            except BaseException as error:  # a C caller cannot carry it: it is raised below
                failures.append(error)
            return len(failures)

        callback = OnLayer(guarded) if on_layer else OnLayer()
        code = self._library.pd_forward(
            self._handle,
            (PartStruct * len(parts))(*parts),
            len(parts),
            ctypes.byref(pool),
            ctypes.byref(batch),
            callback,
            address(logits),
            address(greedy),
        )
        if failures:
            raise failures[0]
        _check(code)

    def head(self, model: ModelStruct, head: LinearStruct, logits: Array, first: int) -> None:
        """Logits of the tokens `first` … that `head`, a run of the head's rows, is for; into fp32 logits
        [rows, vocabulary] of the rows whose logits the last step was asked for."""
        rows, width = logits.shape
        y = logits[:, first:].ctypes.data
        _check(self._library.pd_head(self._handle, ctypes.byref(model), ctypes.byref(head), rows, y, width))

    def linear(self, linear: LinearStruct, x: Array) -> Array:
        """x fp32 [rows, inputs] -> fp32 [rows, outputs]."""
        y: Array = np.empty((len(x), linear.outputs), np.float32)
        _check(self._library.pd_linear(self._handle, ctypes.byref(linear), address(x), len(x), address(y)))
        return y

    def top(self, logits: Array, k: int) -> tuple[Array, Array, Array]:
        """The k best of each row of fp32 [rows, vocabulary], best first, of equal ones the lower id: int32 ids and fp32
        logits [rows, k], and log(sum(exp)) of each whole row [rows]: a logit less that is its log-probability."""
        rows, size = logits.shape
        k = min(k, size)
        ids, values = np.empty((rows, k), np.int32), np.empty((rows, k), np.float32)
        log_sums = np.empty(rows, np.float32)
        self._library.pd_top(
            self._handle, address(logits), rows, size, k, address(ids), address(values), address(log_sums)
        )
        return ids, values, log_sums

    def hadamard(self, x: Array, block: int) -> None:
        """Rotates each run of `block` values of x fp32 [size] in place."""
        self._library.pd_hadamard(address(x), x.size, block)


def _check(code: int) -> None:
    if code:
        raise MemoryError("the native engine found no memory for a step")


def _declare(library: ctypes.CDLL) -> ctypes.CDLL:
    library.pd_engine_create.argtypes = (c_int32, c_int32, c_void_p, c_int32)
    library.pd_engine_create.restype = c_void_p
    library.pd_engine_destroy.argtypes = (c_void_p,)
    library.pd_engine_destroy.restype = None
    library.pd_forward.argtypes = (
        c_void_p, POINTER(PartStruct), c_int32, POINTER(PoolStruct), POINTER(BatchStruct), OnLayer, c_void_p, c_void_p,
    )  # fmt: skip
    library.pd_head.argtypes = (c_void_p, POINTER(ModelStruct), POINTER(LinearStruct), c_int32, c_void_p, c_int32)
    library.pd_linear.argtypes = (c_void_p, POINTER(LinearStruct), c_void_p, c_int32, c_void_p)
    library.pd_top.argtypes = (c_void_p, c_void_p, c_int32, c_int32, c_int32, c_void_p, c_void_p, c_void_p)
    library.pd_top.restype = None
    library.pd_hadamard.argtypes = (c_void_p, c_int32, c_int32)
    library.pd_hadamard.restype = None
    return library
