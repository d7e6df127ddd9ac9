"""Writes the checkpoint as a Hugging Face folder in fp32: what converters read. The values are the checkpoint's own."""

from __future__ import annotations

from pathlib import Path

import safetensors.numpy

from loadtest.peers.folder import made_once
from pdbus.model.checkpoint import open_checkpoint


def hf_folder(checkpoint: Path, cache: Path) -> Path:
    """The checkpoint itself where it is a folder already."""
    if checkpoint.is_dir():
        return checkpoint

    def write(folder: Path) -> None:
        opened = open_checkpoint(checkpoint)
        for name, content in opened.meta.items():
            (folder / name).write_bytes(content)
        safetensors.numpy.save_file(dict(opened.tensors()), folder / "model.safetensors", metadata={"format": "pt"})

    return made_once(cache / f"{checkpoint.stem}-fp32", write)
