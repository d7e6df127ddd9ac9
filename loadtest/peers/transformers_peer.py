"""Hugging Face transformers in fp32: the reference of the model family."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch
import transformers

from loadtest.peers.base import Clock, Prompts, Sources, Timing
from loadtest.peers.folder import shape


class _Steps(transformers.generation.streamers.BaseStreamer):  # type: ignore[misc]
    """Hears each step. The first `put` is the prompt itself."""

    def __init__(self, clock: Clock) -> None:
        self._clock, self._prompt = clock, True

    def put(self, value: object) -> None:
        if not self._prompt:
            self._clock.token()
        self._prompt = False

    def end(self) -> None:
        pass


class _Transformers:
    def __init__(self, path: Path, sources: Sources, threads: int) -> None:
        torch.set_num_threads(threads)
        self.weights = shape(sources).weights(bits=32, kv_bytes=4)
        self._model = transformers.AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()

    @torch.inference_mode()
    def generate(self, prompts: Prompts, new_tokens: int) -> Timing:
        ids = torch.tensor(prompts)
        clock = Clock()
        steps = _Steps(clock) if len(prompts) == 1 else None  # it takes a streamer for one prompt only
        limits = {"min_new_tokens": new_tokens, "max_new_tokens": new_tokens, "do_sample": False}
        made = self._model.generate(ids, attention_mask=torch.ones_like(ids), streamer=steps, pad_token_id=0, **limits)
        return clock.timing(made[0, ids.shape[1] :].tolist())


@dataclass(frozen=True)
class Transformers:
    def prepare(self, sources: Sources) -> Path:
        return sources.folder

    def open(self, path: Path, sources: Sources, threads: int) -> _Transformers:
        return _Transformers(path, sources, threads)
