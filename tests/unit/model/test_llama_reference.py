"""The default model equals the reference (transformers in fp32 on the dequantised file), logits and text."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch

from pdbus.kv.pool import KvPool
from pdbus.model.batch import Batch, SequenceSlice
from pdbus.model.checkpoint import open_checkpoint
from pdbus.model.default import default_checkpoint
from pdbus.model.llama import Llama
from tests.support.llama import load

REFERENCE = Path(__file__).parents[2] / "data" / "reference" / "smollm2.json"
CASES: list[dict[str, Any]] = json.loads(REFERENCE.read_text())["cases"]
END = 2
STEPS = 24
"""Of the 64 tokens that are known of each case. End to end all are compared."""


@pytest.fixture(scope="module")
def model() -> Llama:
    return load(open_checkpoint(str(default_checkpoint())))


@dataclass
class Running:
    """One case on its way, in pages of its own."""

    page_ids: list[int]
    tokens: list[int]
    answer: list[int] = field(default_factory=list)


@pytest.mark.timeout(400)  # a real model
def test_logits_and_greedy_text_of_every_case(model: Llama) -> None:
    """Prompts are read one by one, then all are continued together, as a decode worker does it."""
    pool = KvPool(model.page_format(), 8 * len(CASES))
    running = []
    for number, case in enumerate(CASES):
        one = Running([*range(8 * number, 8 * number + 8)], case["token_ids"])
        count = len(one.tokens)
        batch = Batch(one.tokens, [SequenceSlice(0, count, 0, one.page_ids)], range(count))
        logits = torch.from_numpy(model.forward(batch, pool))
        expected = case["top5_all_positions"]
        best = torch.tensor([position["logits"] for position in expected])
        ids = torch.tensor([position["ids"] for position in expected])
        assert (logits.gather(1, ids) - best).abs().max() < 1e-3
        assert (logits.topk(5).values - best).abs().max() < 1e-3, "nothing else comes before them"
        assert abs(float(logits[-1].logsumexp(0)) - case["logsumexp_last"]) < 1e-3
        one.answer.append(int(logits[-1].argmax()))
        running.append(one)

    for step in range(STEPS - 1):
        slices = [SequenceSlice(row, 1, len(one.tokens) + step, one.page_ids) for row, one in enumerate(running)]
        batch = Batch([one.answer[-1] for one in running], slices, range(len(running)))
        for one, best_id in zip(running, model.forward(batch, pool).argmax(-1).tolist(), strict=True):
            one.answer.append(best_id)

    for one, case in zip(running, CASES, strict=True):
        assert one.answer == case["greedy64_ignore_eos_ids"][:STEPS]
        stop = one.answer.index(END) + 1 if END in one.answer else STEPS
        assert one.answer[:stop] == case["greedy_ids"][:stop]
