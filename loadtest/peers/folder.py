"""The common source of all peers: the checkpoint as a Hugging Face folder in fp32."""

from __future__ import annotations

import json
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path

from loadtest.peers.base import Shape, Sources


def shape(sources: Sources) -> Shape:
    return Shape.of(json.loads((sources.folder / "config.json").read_text()))


def quantised(sources: Sources, kind: str) -> Path:
    """Where the GGUF file goes that llama.cpp's quantiser makes."""
    return sources.cache / f"llama-cpp-{kind}" / "model.gguf"


def made_once(target: Path, make: Callable[[Path], object]) -> Path:
    """Lets `make` fill a new folder and puts it at `target`, whole or not at all; nothing where it is there already."""
    if not target.exists():
        target.parent.mkdir(parents=True, exist_ok=True)
        scratch = Path(tempfile.mkdtemp(dir=target.parent))
        try:
            make(scratch)
            scratch.rename(target)
        finally:
            shutil.rmtree(scratch, ignore_errors=True)
    return target
