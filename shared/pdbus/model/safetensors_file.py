"""One safetensors file, read without torch: numpy has no bfloat16, so raw bytes are widened here."""

from __future__ import annotations

import json
import math
import re
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from safetensors import SafetensorError, safe_open

from pdbus.model.refusal import CheckpointError, UnsupportedModel
from pdbus.model.source import Tensor

MAX_HEADER_BYTES = 16 << 20
_DTYPES = {"F32": "<f4", "F16": "<f2", "BF16": "<u2"}
# 0, 1, 2, … as integers, which old versions of transformers stored with an encoder: it is never read
_COUNTING = re.compile(r"(.+\.)?position_ids")


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """Where one tensor's bytes lie in its file."""

    path: Path
    dtype: str
    shape: tuple[int, ...]
    offset: int

    def read(self) -> Tensor:
        """The tensor in float32, exactly: every float16 and bfloat16 value is a float32 value."""
        shape = self.shape or (1,)
        try:
            raw = np.memmap(self.path, dtype=_DTYPES[self.dtype], mode="r", offset=self.offset, shape=shape)
        except (OSError, ValueError) as error:
            raise CheckpointError.of(self.path, f"can't be read any more: {error}") from error
        if self.dtype == "BF16":
            # bfloat16 is the upper half of a float32
            widened = raw.astype(np.uint32)
            widened <<= 16
            return widened.view(np.float32).reshape(self.shape)
        return np.array(raw, dtype=np.float32, order="C", subok=False).reshape(self.shape)


def stored_tensors(path: Path) -> dict[str, StoredTensor]:
    """The tensors that the header of `path` lists, by name.

    `safetensors` itself checks the header: its length, and that the tensors' ranges fill the rest of the file without
    a gap or an overlap. Raises CheckpointError for a broken file, UnsupportedModel for a number format not served.
    """
    try:
        with path.open("rb") as file:
            header_bytes = int.from_bytes(file.read(8), "little")
            if header_bytes > MAX_HEADER_BYTES:
                raise CheckpointError.of(path, f"claims a header of {header_bytes} bytes; not a safetensors file")
            header = file.read(header_bytes)
        with safe_open(path, framework="numpy"):
            pass
        entries = json.loads(header)
    except OSError as error:
        raise CheckpointError.of(path, f"can't be read: {error.strerror or error}") from error
    except (SafetensorError, ValueError, RecursionError) as error:
        raise CheckpointError.of(path, f"not a valid safetensors file: {error}") from error
    tensors = {}
    for name, entry in entries.items():
        if name == "__metadata__":
            continue
        if entry["dtype"] not in _DTYPES and not _COUNTING.fullmatch(name):
            raise UnsupportedModel(f"{path}: tensor {name} is {entry['dtype']}; served are {', '.join(_DTYPES)}")
        shape = tuple(entry["shape"])
        if math.prod(shape) == 0:
            raise CheckpointError.of(path, f"tensor {name} of shape {shape} is empty")
        tensors[name] = StoredTensor(path, entry["dtype"], shape, 8 + header_bytes + entry["data_offsets"][0])
    return tensors
