"""The default model over the whole path equals an independent implementation (tests/data/reference)."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import openai
import pytest

from tests.support.stack import Stack

_REFERENCE = json.loads((Path(__file__).parents[1] / "data/reference/smollm2.json").read_text())
CASES: list[dict[str, Any]] = _REFERENCE["cases"]
END = _REFERENCE["eos_token_id"]

each_case = pytest.mark.parametrize("case", CASES, ids=[f"{case['n_tokens']}-tokens" for case in CASES])


def _complete(client: openai.OpenAI, model: str, **body: Any) -> Any:
    """A greedy completion; `return_token_ids` is pdbus's own field."""
    extra = {"return_token_ids": True} | body.pop("extra_body", {})
    return client.completions.create(model=model, temperature=0, extra_body=extra, **body).choices[0]


@each_case
def test_the_prompt_is_cut_into_the_same_tokens(client: openai.OpenAI, stack: Stack, case: dict[str, Any]) -> None:
    answer = client.completions.create(model=stack.model, prompt=case["prompt"], max_tokens=1, temperature=0)
    assert answer.usage is not None
    assert answer.usage.prompt_tokens == case["n_tokens"]
    by_text = _complete(client, stack.model, prompt=case["prompt"], max_tokens=1)
    by_ids = _complete(client, stack.model, prompt=case["token_ids"], max_tokens=1)
    assert by_text.text == by_ids.text


@each_case
def test_greedy_continuations_are_equal(client: openai.OpenAI, stack: Stack, case: dict[str, Any]) -> None:
    choice = _complete(client, stack.model, prompt=case["prompt"], max_tokens=64)
    expected = [token for token in case["greedy_ids"] if token != END]
    assert choice.token_ids == expected
    assert choice.finish_reason == ("stop" if END in case["greedy_ids"] else "length")
    assert choice.text == case["greedy_text"].removesuffix("<|im_end|>")


@each_case
def test_greedy_continuations_past_the_end_token_are_equal(
    client: openai.OpenAI, stack: Stack, case: dict[str, Any]
) -> None:
    choice = _complete(client, stack.model, prompt=case["prompt"], max_tokens=64, extra_body={"ignore_eos": True})
    assert choice.token_ids == case["greedy64_ignore_eos_ids"]


@each_case
def test_log_probabilities_are_the_reference_logits(client: openai.OpenAI, stack: Stack, case: dict[str, Any]) -> None:
    """The next token's five best: logit − logsumexp, within 1e-3."""
    choice = _complete(client, stack.model, prompt=case["prompt"], max_tokens=1, logprobs=5)
    expected = [entry["logit"] - case["logsumexp_last"] for entry in case["top5_last"]]
    found = sorted(choice.logprobs.top_logprobs[0].values(), reverse=True)[:5]
    assert found == pytest.approx(expected, abs=1e-3)
    assert choice.logprobs.tokens[0] == case["top5_last"][0]["token"]


@each_case
def test_prompt_log_probabilities_are_the_reference_logits(
    client: openai.OpenAI, stack: Stack, case: dict[str, Any]
) -> None:
    """At every position of the prompt, the differences between the five best logits, within 1e-3."""
    choice = _complete(client, stack.model, prompt=case["prompt"], max_tokens=1, logprobs=5, echo=True)
    positions = choice.logprobs.top_logprobs
    assert positions[0] is None  # nothing comes before the first token
    for expected, found in zip(case["top5_all_positions"], positions[1:], strict=False):
        best = sorted(found.values(), reverse=True)[:5]
        logits = expected["logits"]
        assert [best[0] - value for value in best] == pytest.approx([logits[0] - x for x in logits], abs=1e-3)
