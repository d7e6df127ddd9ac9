"""OpenVINO GenAI, which reads GGUF files itself: the default one, and one in 8 bits that llama.cpp made of it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np
import openvino
import openvino_genai

from loadtest.peers.base import Clock, Prompts, Sources, Timing, Unusable
from loadtest.peers.folder import quantised, shape

Kind = Literal["q4_1", "q8_0"]

_BITS: dict[Kind, float] = {"q4_1": 5.0, "q8_0": 8.5}
"""It keeps the file's groups of 32, with their fp16 scales and, in 4 bits, least values."""


class _Steps(openvino_genai.StreamerBase):  # type: ignore[misc]
    def __init__(self, clock: Clock) -> None:
        super().__init__()
        self._clock = clock

    def write(self, token: int | list[int]) -> openvino_genai.StreamingStatus:
        for _ in token if isinstance(token, list) else (token,):
            self._clock.token()
        return openvino_genai.StreamingStatus.RUNNING

    def end(self) -> None:
        pass


class _OpenVino:
    def __init__(self, path: Path, sources: Sources, kind: Kind, threads: int) -> None:
        self.weights = shape(sources).weights(_BITS[kind], kv_bytes=1)  # KV in 8 bits, its default on CPU
        self._pipeline = openvino_genai.LLMPipeline(str(path), "CPU", INFERENCE_NUM_THREADS=threads)

    def generate(self, prompts: Prompts, new_tokens: int) -> Timing:
        config = openvino_genai.GenerationConfig()
        config.max_new_tokens, config.ignore_eos, config.do_sample = new_tokens, True, False
        config.apply_chat_template = False
        ids = np.array(prompts, np.int64)
        clock = Clock()
        if len(prompts) == 1:  # it takes a streamer for one prompt only
            made = self._pipeline.generate(openvino.Tensor(ids), config, _Steps(clock))
            return clock.timing(made.tokens[0])
        inputs = openvino_genai.TokenizedInputs(openvino.Tensor(ids), openvino.Tensor(np.ones_like(ids)))
        return clock.timing(self._pipeline.generate(inputs, config).tokens[0])


@dataclass(frozen=True)
class OpenVino:
    kind: Kind

    def prepare(self, sources: Sources) -> Path:
        if sources.gguf is None:
            raise Unusable("it is compared on a GGUF file, which this checkpoint is not")
        if self.kind == "q4_1":
            return sources.gguf
        path = quantised(sources, self.kind)
        if not path.exists():
            raise Unusable("its 8-bit file is made by llama.cpp, which didn't do so")
        return path

    def open(self, path: Path, sources: Sources, threads: int) -> _OpenVino:
        return _OpenVino(path, sources, self.kind, threads)
