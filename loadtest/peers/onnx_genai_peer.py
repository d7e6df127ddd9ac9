"""ONNX Runtime GenAI, in fp32 and int4 as its model builder makes them."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import onnxruntime_genai

from loadtest.peers.base import Clock, Prompts, Sources, Timing, Unusable
from loadtest.peers.folder import made_once, shape

Kind = Literal["fp32", "int4"]

_BITS: dict[Kind, float] = {"fp32": 32, "int4": 4 + 32 / 32}
"""int4 comes in groups of 32 with an fp32 scale each."""
_BUILD_S = 900


class _OnnxGenai:
    def __init__(self, path: Path, sources: Sources, kind: Kind) -> None:
        self.weights = shape(sources).weights(_BITS[kind], kv_bytes=4)
        self._model = onnxruntime_genai.Model(str(path))

    def generate(self, prompts: Prompts, new_tokens: int) -> Timing:
        params = onnxruntime_genai.GeneratorParams(self._model)
        length = len(prompts[0]) + new_tokens
        params.set_search_options(max_length=length, min_length=length, batch_size=len(prompts), do_sample=False)
        generator = onnxruntime_genai.Generator(self._model, params)
        clock = Clock()
        generator.append_tokens([list(prompt) for prompt in prompts] if len(prompts) > 1 else list(prompts[0]))
        for _ in range(new_tokens):
            generator.generate_next_token()
            clock.token()
        return clock.timing(generator.get_sequence(0)[len(prompts[0]) :])


@dataclass(frozen=True)
class OnnxGenai:
    kind: Kind

    def prepare(self, sources: Sources) -> Path:
        return made_once(sources.cache / f"onnx-genai-{self.kind}", lambda folder: self._build(sources, folder))

    def open(self, path: Path, sources: Sources, threads: int) -> _OnnxGenai:
        config = path / "genai_config.json"
        settings = json.loads(config.read_text())
        options = settings["model"]["decoder"]["session_options"]
        if options.get("intra_op_num_threads") != threads:
            options["intra_op_num_threads"] = threads
            config.write_text(json.dumps(settings, indent=4))
        return _OnnxGenai(path, sources, self.kind)

    def _build(self, sources: Sources, folder: Path) -> None:
        command = [sys.executable, "-m", "onnxruntime_genai.models.builder", "-m", "model", "-i", str(sources.folder)]
        command += ["-o", str(folder), "-p", self.kind, "-e", "cpu", "-c", str(sources.cache / "scratch")]
        done = subprocess.run(command, capture_output=True, text=True, timeout=_BUILD_S, check=False)
        if done.returncode:
            raise Unusable(f"its model builder failed: {done.stderr.strip().splitlines()[-1:]}")
