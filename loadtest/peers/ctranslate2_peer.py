"""CTranslate2 in int8, as its converter makes it."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

import ctranslate2
import ctranslate2.converters

from loadtest.peers.base import Clock, Prompts, Sources, Timing
from loadtest.peers.folder import made_once, shape


class _CTranslate2:
    def __init__(self, path: Path, sources: Sources, threads: int) -> None:
        self.weights = shape(sources).weights(bits=8, kv_bytes=4)
        self._generator = ctranslate2.Generator(str(path), device="cpu", intra_threads=threads, inter_threads=1)
        self._vocabulary: list[str] = json.loads((path / "vocabulary.json").read_text())

    def generate(self, prompts: Prompts, new_tokens: int) -> Timing:
        words = [[self._vocabulary[token] for token in prompt] for prompt in prompts]
        limits = {"min_length": new_tokens, "max_length": new_tokens, "sampling_topk": 1, "beam_size": 1}
        clock = Clock()

        def step(result: ctranslate2.GenerationStepResult) -> bool:
            if result.batch_id == 0:
                clock.token()
            return False

        made = self._generator.generate_batch(words, include_prompt_in_result=False, callback=step, **limits)
        return clock.timing(made[0].sequences_ids[0])


@dataclass(frozen=True)
class CTranslate2:
    def prepare(self, sources: Sources) -> Path:
        def convert(folder: Path) -> None:
            converter = ctranslate2.converters.TransformersConverter(str(sources.folder))
            converter.convert(str(folder), quantization="int8", force=True)

        return made_once(sources.cache / "ctranslate2-int8", convert)

    def open(self, path: Path, sources: Sources, threads: int) -> _CTranslate2:
        return _CTranslate2(path, sources, threads)
