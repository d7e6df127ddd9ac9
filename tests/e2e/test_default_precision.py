"""G9 in the precision that a stack has unless told otherwise: whole answers with their log-probabilities, to the bit.

The reference is the model alone in this process. The stack's answers are handed over from prefill to decode; alone and
among fifteen others, with small and large chunks, with the prefix cached and not."""

from __future__ import annotations

import asyncio
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import aiohttp
import pytest
import tokenizers

from pdbus.bus.bus import connect
from pdbus.bus.presence import Fleet
from pdbus.client.weights import Weights
from pdbus.context import Deadline
from pdbus.model.backends import BackendOptions, open_backend
from pdbus.model.checkpoint import open_checkpoint
from pdbus.model.default import default_checkpoint
from pdbus.model.native_backend import NativeBackend
from pdbus.model.native_llama import NativeLlama
from pdbus.model.sampler import token_logprob
from tests.support.equal_text import PROMPTS
from tests.support.llama import Runner
from tests.support.stack import APART, Stack, running_stack

TOKENS = 24
TOP = 3


@dataclass(frozen=True)
class Answer:
    ids: tuple[int, ...]
    logprobs: tuple[tuple[float, ...], ...]
    """At each token: its own log-probability, then those of the best ones. Normalised over the whole vocabulary, so
    that any other bit in the logits shows."""


@dataclass(frozen=True)
class Reference:
    compute_class: str
    prompts: list[list[int]]
    answers: list[Answer]


@pytest.fixture(scope="module")
def reference() -> Iterator[Reference]:
    checkpoint = open_checkpoint(default_checkpoint())
    tokenizer = tokenizers.Tokenizer.from_str(checkpoint.meta["tokenizer.json"].decode())
    prompts = [tokenizer.encode(prompt, add_special_tokens=False).ids for prompt in PROMPTS]
    backend = open_backend(BackendOptions(), checkpoint.config)
    if not isinstance(backend, NativeBackend):
        pytest.skip("torch serves here, in fp32: test_equal_text.py")
    model = backend.build(checkpoint.config, {}, dict(checkpoint.tensors()), None)
    assert isinstance(model, NativeLlama)
    yield Reference(backend.compute_class, prompts, [_alone(model, prompt) for prompt in prompts])
    backend.close()


def _alone(model: NativeLlama, prompt: list[int]) -> Answer:
    runner = Runner(model, kv_dtype="int8")
    ids: list[int] = []
    logprobs = []
    row = runner.logits(prompt)[-1].numpy()
    for _ in range(TOKENS):
        ids.append(int(row.argmax()))
        found = token_logprob(row, ids[-1], TOP)
        logprobs.append((found.logprob, *(value for _, value in found.top)))
        row = runner.logits(ids[-1:], past=len(prompt) + len(ids) - 1)[-1].numpy()
    return Answer(tuple(ids), tuple(logprobs))


@pytest.fixture(scope="module")
def default(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    with running_stack(tmp_path_factory.mktemp("default"), *APART) as running:
        yield running


@pytest.fixture(scope="module")
def small_chunks(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    with running_stack(tmp_path_factory.mktemp("chunks"), *APART, env={"PDBUS_CHUNK_TOKENS": "16"}) as running:
        yield running


async def _ask(http: aiohttp.ClientSession, stack: Stack, prompt: list[int], ref: str = "") -> tuple[Answer, int, str]:
    """The answer, how many of the prompt's tokens were cached, and the version that answered."""
    body = {"model": f"{stack.model}{ref}", "prompt": prompt, "max_tokens": TOKENS, "temperature": 0, "logprobs": TOP}
    body |= {"return_token_ids": True, "ignore_eos": True}
    headers = {"Cache-Control": "no-cache, no-store"}  # the result cache is not what is tested here
    async with http.post(f"{stack.url}/v1/completions", json=body, headers=headers) as response:
        answer = await response.json()
        assert response.status == 200, answer
    [choice] = answer["choices"]
    told = choice["logprobs"]
    best = [sorted(top.values(), reverse=True)[:TOP] for top in told["top_logprobs"]]
    logprobs = tuple((own, *top) for own, top in zip(told["token_logprobs"], best, strict=True))
    cached = answer["usage"]["prompt_tokens_details"]["cached_tokens"]
    return Answer(tuple(choice["token_ids"]), logprobs), cached, answer["system_fingerprint"]


async def _one_by_one(stack: Stack, prompts: Sequence[list[int]]) -> tuple[list[Answer], list[int]]:
    async with aiohttp.ClientSession() as http:
        found = [await _ask(http, stack, prompt) for prompt in prompts]
    return [answer for answer, _, _ in found], [cached for _, cached, _ in found]


async def _together(stack: Stack, prompts: Sequence[list[int]]) -> list[Answer]:
    async with aiohttp.ClientSession() as http:
        return [answer for answer, _, _ in await asyncio.gather(*(_ask(http, stack, prompt) for prompt in prompts))]


async def test_the_workers_compute_in_int8_and_say_so(default: Stack, reference: Reference) -> None:
    assert "/w-int8" in reference.compute_class
    assert reference.compute_class.endswith("/kv-int8")
    async with connect(default.nats_url, name="test") as bus, Fleet(bus) as fleet:
        await fleet.wait_for(lambda seen: bool(seen.live("prefill") and seen.live("decode")), Deadline.after(60))
        cards = [*fleet.live("prefill"), *fleet.live("decode")]
    assert {card.compute_class for card in cards} == {reference.compute_class}


@pytest.mark.timeout(400)
@pytest.mark.slow
async def test_not_a_bit_depends_on_batch_chunks_caches_or_the_hand_over(
    default: Stack, small_chunks: Stack, reference: Reference
) -> None:
    prompts, expected = reference.prompts, reference.answers
    cold, cached = await _one_by_one(default, prompts)
    # Nothing shared but by chance; one that was begun anew elsewhere finds what it had read before.
    assert statistics.median(cached) < 16
    assert cold == expected
    warm, cached = await _one_by_one(default, prompts[:4])
    assert min(cached) >= 32
    assert warm == expected[:4]
    assert await _together(default, prompts) == expected
    assert await _together(small_chunks, prompts) == expected
    assert (await _one_by_one(small_chunks, prompts[:4]))[0] == expected[:4]


@pytest.mark.timeout(400)
async def test_the_version_made_in_int8_at_a_param_server_answers_with_the_same_bits_under_its_own_name(
    default: Stack, reference: Reference
) -> None:
    async with connect(default.nats_url, name="test") as bus:
        weights = Weights(bus, default.model)
        root = (await weights.history()).refs["stable"]
        await weights.convert("stable", "int8")
        made = await weights.converted(root, "int8", 200.0)
        assert await weights.wait_for_ref("stable-int8", made, 100.0)
        await weights.close()
    async with aiohttp.ClientSession() as http:
        for ref, version in (("@stable-int8", made), ("@stable", root)):
            answer, _, fingerprint = await _ask(http, default, reference.prompts[0], ref)
            assert answer == reference.answers[0]
            assert version.hex().startswith(fingerprint.removeprefix("root-"))


@pytest.mark.slow
@pytest.mark.timeout(700)
async def test_a_prompt_of_the_whole_context_is_answered_and_one_more_token_is_refused(
    default: Stack, reference: Reference
) -> None:
    words = [token for prompt in reference.prompts for token in prompt]
    context = 8192
    whole = (words * (context // len(words) + 1))[:context]
    headers = {"Cache-Control": "no-cache, no-store", "X-Request-Timeout-Ms": "600000"}
    async with aiohttp.ClientSession(headers=headers) as http:

        async def ask(prompt: list[int]) -> tuple[int, dict[str, Any]]:
            body = {"model": default.model, "prompt": prompt, "temperature": 0, "max_tokens": 1}
            async with http.post(f"{default.url}/v1/completions", json=body) as response:
                return response.status, await response.json()

        status, answer = await ask(whole[:-1])
        assert status == 200, answer
        assert answer["usage"]["prompt_tokens"] == context - 1
        assert answer["usage"]["completion_tokens"] == 1
        status, answer = await ask(whole)
        assert (status, answer["error"]["type"]) == (400, "invalid_request_error")
        assert str(context) in answer["error"]["message"]
