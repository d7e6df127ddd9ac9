"""What every kind of checkpoint is turned into before it is checked: a config in Hugging Face form, files, tensors."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from pdbus.model.refusal import CheckpointError

Tensor = npt.NDArray[np.float32]

MAX_JSON_BYTES = 64 << 20


@dataclass(frozen=True, slots=True)
class Source:
    """An opened checkpoint: headers are read and bounded by the size of their files, no tensor is read yet."""

    path: Path
    config: Mapping[str, Any]
    """The content of config.json, in Hugging Face form."""
    meta: Mapping[str, bytes]
    """tokenizer.json, tokenizer_config.json, generation_config.json and, if there is one, chat_template.jinja; of an
    encoder sentence.json."""
    largest_token_id: int
    """Of all that tokenizer.json may produce; -1 if it has no token at all."""
    shapes: Mapping[str, tuple[int, ...]]
    """Shape of each tensor under its Hugging Face name."""
    read: Callable[[str], Tensor]
    """Reads one tensor, widened to float32, C order, of its own memory. Names are those of `shapes`."""


def dump(content: object) -> bytes:
    """JSON as it goes into `meta`: the same bytes for the same content, since they become part of a root."""
    return json.dumps(content, ensure_ascii=False, indent=1, sort_keys=True).encode()


def read_bytes(path: Path) -> bytes:
    """A whole small file. Raises CheckpointError if it can't be read or is larger than MAX_JSON_BYTES."""
    try:
        size = path.stat().st_size
        if size > MAX_JSON_BYTES:
            raise CheckpointError.of(path, f"{size} bytes is more than such a file may have ({MAX_JSON_BYTES})")
        return path.read_bytes()
    except OSError as error:
        raise CheckpointError.of(path, f"can't be read: {error.strerror or error}") from error


def decode(path: Path, content: bytes) -> str:
    """The text that `path` holds. Raises CheckpointError if it isn't UTF-8."""
    try:
        return content.decode()
    except UnicodeDecodeError as error:
        raise CheckpointError.of(path, f"not UTF-8: {error.reason} at byte {error.start}") from error


def parse_json(path: Path, content: bytes) -> dict[str, Any]:
    """Parses the bytes of `path`. Raises CheckpointError unless they hold a JSON object."""
    try:
        parsed = json.loads(content)
        # Half of a surrogate pair can be escaped, but is no text: it could not be passed on
        json.dumps(parsed, ensure_ascii=False).encode()
    except (ValueError, RecursionError) as error:
        raise CheckpointError.of(path, f"not valid JSON: {error}") from error
    if not isinstance(parsed, dict):
        raise CheckpointError.of(path, "not a JSON object")
    return parsed


def read_json(path: Path) -> dict[str, Any]:
    """A file that holds one JSON object. Raises CheckpointError with the reason if it doesn't."""
    return parse_json(path, read_bytes(path))
