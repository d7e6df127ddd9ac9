"""Writes the checkpoint as a Hugging Face folder in fp32: what converters read. The values are the checkpoint's own."""

from __future__ import annotations

import hashlib
from pathlib import Path

import safetensors.numpy

from loadtest.peers.folder import made_once
from pdbus.model.checkpoint import open_checkpoint


def cache_of(checkpoint: Path, cache: Path) -> Path:
    """The folder for what is made from this checkpoint: another one for other content at the same place."""
    files = sorted(checkpoint.glob("*.safetensors")) if checkpoint.is_dir() else [checkpoint]
    known = [str(checkpoint), *(f"{file.stat().st_size} {file.stat().st_mtime_ns}" for file in files)]
    return cache / f"{checkpoint.stem}-{hashlib.sha256(chr(10).join(known).encode()).hexdigest()[:12]}"


def hf_folder(checkpoint: Path, cache: Path) -> Path:
    """The checkpoint itself where it is a folder already."""
    if checkpoint.is_dir():
        return checkpoint

    def write(folder: Path) -> None:
        opened = open_checkpoint(checkpoint)
        for name, content in opened.meta.items():
            (folder / name).write_bytes(content)
        safetensors.numpy.save_file(dict(opened.tensors()), folder / "model.safetensors", metadata={"format": "pt"})

    return made_once(cache / "hugging-face-fp32", write)
