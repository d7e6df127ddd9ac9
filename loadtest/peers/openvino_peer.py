"""OpenVINO GenAI, which reads the GGUF file itself."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import openvino
import openvino_genai

from loadtest.peers.base import Clock, Prompts, Sources, Timing, Unusable
from loadtest.peers.folder import shape

_BITS = 5.0
"""It keeps the file's 4-bit groups of 32, with a scale and a least value each."""


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
    def __init__(self, path: Path, sources: Sources, threads: int) -> None:
        self.weights = shape(sources).weights(_BITS, kv_bytes=1)  # KV in 8 bits, its default on CPU
        self._pipeline = openvino_genai.LLMPipeline(str(path), "CPU", INFERENCE_NUM_THREADS=threads)

    def generate(self, prompts: Prompts, new_tokens: int) -> Timing:
        config = openvino_genai.GenerationConfig()
        config.max_new_tokens, config.ignore_eos, config.do_sample = new_tokens, True, False
        config.apply_chat_template = False
        ids = np.array(prompts, np.int64)
        clock = Clock()
        if len(prompts) == 1:  # it takes a streamer for one prompt only
            self._pipeline.generate(openvino.Tensor(ids), config, _Steps(clock))
            return clock.timing()
        inputs = openvino_genai.TokenizedInputs(openvino.Tensor(ids), openvino.Tensor(np.ones_like(ids)))
        self._pipeline.generate(inputs, config)
        return clock.timing(new_tokens)


@dataclass(frozen=True)
class OpenVino:
    def prepare(self, sources: Sources) -> Path:
        if sources.gguf is None:
            raise Unusable("it is compared on a GGUF file, which this checkpoint is not")
        return sources.gguf

    def open(self, path: Path, sources: Sources, threads: int) -> _OpenVino:
        return _OpenVino(path, sources, threads)
