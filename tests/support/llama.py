"""Drives a model alone, without an engine: what the engine's answers are held against."""

from __future__ import annotations

import torch
from torch import Tensor

from pdbus.kv.format import KvDtype
from pdbus.kv.pool import KvPool
from pdbus.model.batch import Batch, SequenceSlice
from pdbus.model.build import build
from pdbus.model.checkpoint import Checkpoint
from pdbus.model.llama import Llama
from pdbus.model.native_llama import NativeLlama
from pdbus.model.native_pool import NativePool


def load(checkpoint: Checkpoint) -> Llama:
    return build(checkpoint.config, {}, dict(checkpoint.tensors()))


class Runner:
    """One sequence at a time, in pages that are not in order."""

    def __init__(
        self, model: Llama | NativeLlama, pages: int = 64, chunk: int = 10_000, kv_dtype: KvDtype = "fp32"
    ) -> None:
        self.model = model
        make_pool = KvPool if isinstance(model, Llama) else NativePool
        self.pool = make_pool(model.page_format(kv_dtype), pages)
        self.page_ids = list(reversed(range(pages)))
        self.chunk = chunk

    def logits(self, tokens: list[int], past: int = 0) -> Tensor:
        """Logits of every token, [tokens, vocab], reading them in chunks."""
        parts = []
        for start in range(0, len(tokens), self.chunk):
            part = tokens[start : start + self.chunk]
            piece = SequenceSlice(0, len(part), past + start, self.page_ids)
            parts.append(torch.from_numpy(self.model.forward(Batch(part, [piece], range(len(part))), self.pool)))
        return torch.cat(parts)

    def greedy(self, prompt: list[int], count: int, stop: int | None = None) -> list[int]:
        """The `count` best next tokens, one after another; fewer where `stop` comes, which is the last then."""
        answer: list[int] = []
        row = self.logits(prompt)[-1]
        while len(answer) < count:
            answer.append(int(row.argmax()))
            if answer[-1] == stop:
                break
            row = self.logits(answer[-1:], past=len(prompt) + len(answer) - 1)[-1]
        return answer
