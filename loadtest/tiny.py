"""A checkpoint that costs nothing to compute: for measuring what stands around an engine, and for quick runs."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import safetensors.numpy

from loadtest.simulated_version import meta_files
from pdbus.model.config import expected_tensors, from_hf


def tiny_checkpoint(folder: Path, context_tokens: int = 2048, **larger: int) -> Path:
    """Writes a Hugging Face folder: 2 layers of width 64, random weights, ids of tokens are bytes. `larger`: other
    sizes, by their names in config.json."""
    files = meta_files()
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 2, "num_key_value_heads": 1} | larger
    config = json.loads(files["config.json"]) | sizes | {"max_position_embeddings": context_tokens}
    folder.mkdir(parents=True, exist_ok=True)
    for name, content in (files | {"config.json": json.dumps(config).encode()}).items():
        (folder / name).write_bytes(content)
    random = np.random.default_rng(0)
    tensors = {
        name: (random.standard_normal(shape) * 0.05).astype(np.float32)
        for name, shape in expected_tensors(from_hf(config)).items()
    }
    safetensors.numpy.save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder
