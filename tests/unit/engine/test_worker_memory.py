"""What a worker of the native engine doesn't need is not in its memory: torch, readers of files, a model in fp32."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from pdbus.native.build import levels

FOREIGN = ("torch", "transformers", "gguf", "safetensors", "tokenizers", "huggingface_hub", "rich", "jinja2")


@pytest.mark.parametrize("service", ["prefill", "decode"])
def test_a_worker_imports_nothing_that_others_need(service: str) -> None:
    code = f"import sys, pdbus.{service}.service, pdbus.{service}.settings, pdbus.runtime; print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    modules = done.stdout.split()
    assert "numpy" in modules
    assert not {name.partition(".")[0] for name in modules} & set(FOREIGN)
    assert not [name for name in modules if name.startswith("opentelemetry.exporter.otlp")]


LOADS = """
import asyncio, json, sys
import numpy as np
from loadtest.memory import peak_bytes
from pdbus.engine.version import load
from pdbus.model.backends import BackendOptions, open_backend
from pdbus.model.batch import Batch, SequenceSlice
from pdbus.model.config import expected_tensors, from_hf
from pdbus.weights.blocks import block_count
from pdbus.weights.layer import Tensor
from pdbus.weights.manifest import Manifest

HF = dict(model_type="llama", vocab_size=32000, hidden_size=512, intermediate_size=2048, num_hidden_layers=8,
          num_attention_heads=8, num_key_value_heads=8, max_position_embeddings=256, tie_word_embeddings=True)
CONFIG = from_hf(HF)
SHAPES = expected_tensors(CONFIG)

class Source:
    async def manifest(self, root, ctx):
        return Manifest.build(
            Tensor(name, "fp32", shape, (bytes(32),) * block_count(shape, "fp32")) for name, shape in SHAPES.items()
        )
    async def meta(self, root, ctx):
        return {"config.json": json.dumps(HF).encode()}
    async def runs(self, *asked, progress=None):
        raise AssertionError("no older version is there")
    async def tensors(self, root, ctx, names, *, rows=None, progress=None):
        made = {}
        for name in names:
            count, *rest = SHAPES[name]
            made[name] = np.full((rows.stop - rows.start if rows else count, *rest), 0.01, np.float32)
        return made

async def main():
    backend = open_backend(BackendOptions("native", "int8", "int8"), CONFIG)
    async def backend_for(config):
        return backend
    before = peak_bytes()
    version = await load(bytes(32), Source(), (), backend_for, lambda done, total: None)
    loaded = peak_bytes()
    pool = backend.pool(version.scope.page_format, 1)
    logits = version.model.forward(Batch([1, 2, 3], [SequenceSlice(0, 3, 0, [0])], [2]), pool)
    assert np.isfinite(logits).all()
    print(json.dumps({"grown": loaded - before, "packed": version.model.nbytes, "torch": "torch" in sys.modules,
                      "fp32": 4 * sum(int(np.prod(shape)) for shape in SHAPES.values())}))
    backend.close()

asyncio.run(main())
"""


@pytest.mark.skipif(not levels(), reason="no kernels for this processor")
def test_a_load_takes_little_more_than_the_packed_weights() -> None:
    done = subprocess.run([sys.executable, "-c", LOADS], check=True, capture_output=True, text=True)
    told = json.loads(done.stdout)
    assert not told["torch"]
    assert told["packed"] < 0.45 * told["fp32"]
    # Two layers in fp32, what is made of a run on the way, and what the allocator keeps until the end.
    assert told["grown"] < told["packed"] + 0.45 * told["fp32"]
