"""int8 and int4 workers answer as the model alone does, to the bit of its logits, on every way that a page can take."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import pytest

from pdbus.kv.format import KvDtype
from pdbus.messages.common import Sampling
from pdbus.model.backends import BackendOptions, Precision, open_backend
from pdbus.model.checkpoint import Checkpoint
from pdbus.native.build import levels
from tests.support.asking import ids
from tests.support.llama import Runner
from tests.support.workers import LocalSource, NewBus, prompt_of, rig

pytestmark = pytest.mark.skipif(not levels(), reason="no kernels for this processor")

LOGPROBS = Sampling(temperature=0.0, logprobs=1)


@pytest.mark.parametrize(("precision", "kv_dtype"), [("int8", "fp32"), ("int4", "fp16"), ("int8", "int8")])
async def test_neither_chunks_nor_neighbours_nor_the_hand_over_change_a_bit(
    twin: NewBus,
    source: LocalSource,
    checkpoints: dict[str, Checkpoint],
    unique: Callable[[str], str],
    precision: Precision,
    kv_dtype: KvDtype,
) -> None:
    options = BackendOptions("native", precision, kv_dtype)
    checkpoint = checkpoints["a"]
    backend = open_backend(options, checkpoint.config)
    model = backend.build(checkpoint.config, {}, dict(checkpoint.tensors()), None)
    prompts = [prompt_of(length, seed) for seed, length in enumerate((3, 40, 90))]
    async with rig(
        twin, source, name=unique("tiny"), engine="native", precision=precision, kv_dtype=kv_dtype
    ) as workers:
        router = workers.router
        assert workers.prefill.versions.compute_class == workers.decode.versions.compute_class == backend.compute_class
        asked = (router.answer(router.ticket(prompt, 10, sampling=LOGPROBS)) for prompt in prompts)
        for prompt, items in zip(prompts, await asyncio.gather(*asked), strict=True):
            assert ids(items) == Runner(model, kv_dtype=kv_dtype).greedy(prompt, 10)
            rows = Runner(model, kv_dtype=kv_dtype).logits(prompt + ids(items)).double().log_softmax(-1)
            told = [item.logprobs[0].logprob for item in items]
            alone = [float(rows[len(prompt) - 1 + at, token]) for at, token in enumerate(ids(items))]
            assert told == pytest.approx(alone, rel=0, abs=1e-12)
        await workers.until_idle()
    backend.close()
