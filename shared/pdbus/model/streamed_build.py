"""Builds a version whose packed weights lie in files: a layer in one, embedding and head in runs of rows.

Pieces are found by what they are made from, so that a version shares with any other what is the same in both, on this
host and in the worker. No more than a part of the model in fp32 is in memory at once.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Generic, Protocol, TypeAlias, TypeVar

import numpy as np

from pdbus.errors import Corrupt, Unavailable
from pdbus.messages.common import Digest
from pdbus.model.config import expected_tensors
from pdbus.model.parts import NORM, Changes, Part, Patch, packed_dtypes, parts_of, patches_of
from pdbus.model.piece_keys import PieceKeys
from pdbus.model.residency import Residency
from pdbus.model.shelf import Piece
from pdbus.weights.layer import layer_of

Array: TypeAlias = "np.ndarray[Any, Any]"
M_co = TypeVar("M_co", covariant=True)


@dataclass(frozen=True, slots=True)
class Pieces:
    """All of a version's weights."""

    by_key: Mapping[Digest, Piece]
    layers: tuple[Piece, ...]
    embedding: tuple[Piece, ...]
    head: tuple[Piece, ...]
    gains: Array
    """Of the last norm; always in memory."""


class PieceOfLayer(Protocol):
    """A layer in the making, from an older one."""

    def put(self, name: str, start: int, values: Array) -> None: ...

    def piece(self) -> Piece: ...


class Form(Protocol[M_co]):
    """How an engine has its weights."""

    def layer(self, index: int, tensors: Mapping[str, Any]) -> Piece:
        """`tensors`: fp32 or Int8Rows, of which an engine gets what it takes."""

    def patch(self, index: int, old: Piece) -> PieceOfLayer | None:
        """None where it can't be patched."""

    def embedding(self, rows: Array) -> Piece: ...

    def head(self, rows: Any) -> Piece: ...

    def model(self, pieces: Pieces, digests: Mapping[str, Digest]) -> M_co: ...


class StreamedBuilder(Generic[M_co]):
    """A Builder (model/backend.py)."""

    def __init__(
        self,
        form: Form[M_co],
        residency: Residency,
        keys: PieceKeys,
        old: Pieces | None,
        changes: Changes,
    ) -> None:
        """Takes pieces of `old`, and of the shelf, as far as they are there."""
        self._form, self._residency, self._keys = form, residency, keys
        self._shelf, self._config = keys.shelf, keys.config
        config = keys.config
        self._found: dict[Digest, Piece] = {}
        self._patching: dict[int, PieceOfLayer] = {}
        self._patched: dict[int, PieceOfLayer] = {}
        self._all = parts_of(config, {*expected_tensors(config), keys.head_source}, packed_dtypes(keys.tensors))
        needed = [part for part in self._all if not self._has(part, old)]
        for index in range(config.layers) if old else ():
            layer = f"layers.{index}"
            if layer in changes and any(part.layer == layer for part in needed):
                patch = form.patch(index, old.layers[index]) if old else None
                if patch is not None:
                    self._patching[index] = patch
        patched = {f"layers.{index}" for index in self._patching}
        self.parts: tuple[Part, ...] = tuple(part for part in needed if part.layer not in patched)
        self.patches = patches_of(config, (run for layer in sorted(patched) for run in changes[layer]))

    def add(self, part: Part, arrays: Mapping[str, Any]) -> None:
        part.check(arrays)
        if part.start is None and part.layer == "head":
            self._keep(self._keys.norm, "norm", Piece({}, {"gains": arrays[NORM]}))
        elif part.start is None:
            index = int(part.layer.removeprefix("layers."))
            self._keep(self._keys.layer(index), part.layer, self._form.layer(index, arrays))
        else:
            for kind in self._keys.made_of(part):
                (rows,) = arrays.values()
                make = self._form.embedding if kind == "embedding" else self._form.head
                self._keep(self._keys.rows(kind, part), f"{kind}/{part.start}", make(rows))

    def patch(self, patch: Patch, arrays: Sequence[Array]) -> None:
        for run, rows in zip(patch.runs, arrays, strict=True):
            layer = layer_of(run.tensor)
            name = run.tensor.removeprefix(f"model.{layer}.")
            index = int(layer.removeprefix("layers."))
            self._finish_patches(but=index)  # runs come layer by layer: only one layer is in memory
            self._patched.setdefault(index, self._patching[index]).put(name, run.rows.start, rows)

    def finish(self) -> M_co:
        """Raises SettingsError where the budget is too small for it."""
        self._finish_patches()
        layers = tuple(self._found[self._keys.layer(index)] for index in range(self._config.layers))
        runs = [part for part in self._all if part.start is not None]
        ends = {
            kind: tuple(self._found[self._keys.rows(kind, part)] for part in runs if kind in self._keys.made_of(part))
            for kind in ("embedding", "head")
        }
        gains = self._found[self._keys.norm].arrays["gains"].copy()
        pieces = Pieces(self._found, layers, ends["embedding"], ends["head"], gains)
        self._residency.adopt(pieces.layers, pieces.head, pieces.embedding)
        return self._form.model(pieces, dict(self._keys.digests))

    def _finish_patches(self, but: int | None = None) -> None:
        for index in [one for one in self._patched if one != but]:
            self._keep(self._keys.layer(index), f"layers.{index}", self._patched.pop(index).piece())

    def _has(self, part: Part, old: Pieces | None) -> bool:
        """Whether all that is made from the part is here already."""
        if part.start is not None:
            keys = [(self._keys.rows(kind, part), f"{kind}/{part.start}") for kind in self._keys.made_of(part)]
        elif part.layer == "head":
            keys = [(self._keys.norm, "norm")]
        else:
            keys = [(self._keys.layer(int(part.layer.removeprefix("layers."))), part.layer)]
        for key, name in keys:
            piece = (old.by_key.get(key) if old else None) or self._shelf.map(key, name)
            if piece:
                self._found[key] = piece
        return all(key in self._found for key, _ in keys)

    def _keep(self, key: Digest, name: str, piece: Piece) -> None:
        if not self._shelf.put(key, name, piece):
            raise Unavailable("layers can't be streamed: the cache folder takes no files (is its disk full?)")
        found = self._shelf.map(key, name)
        if found is None:
            raise Corrupt(
                "a layer that was just written can't be read: PDBUS_WEIGHT_CACHE_BYTES may be too small for the model"
            )
        self._found[key] = found
