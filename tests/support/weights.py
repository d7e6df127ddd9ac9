"""Versions made up for tests: a few small tensors, as a checkpoint and as blocks."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np

from pdbus.canonical import content_digest
from pdbus.messages.changelog import Commit, LogEntry, Member
from pdbus.weights.blocks import Array, cut, dtype_name
from pdbus.weights.history import History
from pdbus.weights.layer import Tensor, meta_tensor
from pdbus.weights.manifest import Manifest

META = {"config.json": b'{"model_type": "llama"}', "tokenizer.json": b"t" * 300_000}


def some_arrays(seed: int = 0, **changed: Array) -> dict[str, Array]:
    """About 4 MB in 22 blocks; norm 1 and norm 2 are equal, one tensor is empty, one has a single element."""
    random = np.random.default_rng(seed)
    shapes: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (1000, 576),
        "model.layers.0.self_attn.q_proj.weight": (576, 576),
        "model.layers.1.self_attn.q_proj.weight": (300, 576),
        "model.layers.1.empty": (0, 576),
        "model.norm.scale": (),
    }
    arrays = {name: random.random(shape, np.float32) for name, shape in shapes.items()}
    arrays["model.norm.scale"] = np.array(1.5, np.float32)
    for layer in range(2):
        arrays[f"model.layers.{layer}.input_layernorm.weight"] = np.ones(576, np.float32)
    return arrays | changed


def manifest_and_blocks(
    arrays: Mapping[str, Array], meta: Mapping[str, bytes] = META
) -> tuple[Manifest, dict[bytes, bytes]]:
    """The version, and all of its blocks by digest."""
    blocks: dict[bytes, bytes] = {}
    tensors = []
    files = {meta_tensor(name): np.frombuffer(content, np.uint8) for name, content in meta.items()}
    for name, array in {**arrays, **files}.items():
        digests = []
        for content in cut(array):
            digests.append(content_digest(content))
            blocks[digests[-1]] = bytes(content)
        tensors.append(Tensor(name, dtype_name(array.dtype), array.shape, tuple(digests)))
    manifest = Manifest.build(tensors)
    blocks |= {content_digest(content): content for content in manifest.manifests()}
    return manifest, blocks


def following(members: tuple[str, ...], *roots: bytes) -> Any:
    """Stands for a HistoryFollower whose log holds these members and commits."""
    history = History()
    entries = [LogEntry(member=Member(member, "join")) for member in members]
    entries += [LogEntry(commit=Commit(root.hex(), root, None, "test", "", ())) for root in roots]
    for seq, entry in enumerate(entries, 1):
        history.apply(seq, seq * 1_000_000_000, entry)
    return SimpleNamespace(history=history)


def fake_checkpoint(arrays: Mapping[str, Array], meta: Mapping[str, bytes] = META) -> Any:
    """Stands for a model.checkpoint.Checkpoint, as far as reading it goes."""
    source = SimpleNamespace(path=Path("fake"), shapes={name: array.shape for name, array in arrays.items()})
    return SimpleNamespace(name="fake", meta=meta, source=source, tensors=lambda: iter(arrays.items()))
