"""Goal 3: one prompt before an update, after it, and after a rollback: what is taken from caches, and what is said."""

from __future__ import annotations

import time
from dataclasses import dataclass

from loadtest.asking import Failed
from loadtest.client import Observation, ask
from loadtest.goals import Row, none_of
from loadtest.prompts import Prompts
from loadtest.weights.changes import Change, Changes
from loadtest.weights.commits import STABLE, Told, commit, settled
from loadtest.weights.load import Asked, Loader
from loadtest.weights.oracle import oracle
from loadtest.weights.terms import Subject, Terms, subject
from pdbus.kv.format import PAGE_TOKENS

_TOKENS = 512
_NEW_TOKENS = 24
_ANSWER_S = 60.0
_NORM = "model.norm.weight"


@dataclass(frozen=True, slots=True)
class Step:
    """What was done before the prompt was asked for again, and how many of its tokens have to be cached then."""

    name: str
    want: int
    asked: Asked

    @property
    def cached(self) -> int:
        return self.asked.seen.cached_tokens


async def measure(terms: Terms) -> list[Row]:
    changes, loader = Changes(terms.model), Loader(Prompts.of(terms.model))
    last = changes.decoder_layers - 1
    below = changes.named("model.layers.1.self_attn.k_proj.weight")
    updates: tuple[tuple[str, Change, bool], ...] = (
        ("k projection of layer 1", below, True),
        ("final norm", changes.named(_NORM), False),
        (f"MLP of the last layer, {last}", changes.named(f"model.layers.{last}.mlp.down_proj.weight"), False),
    )
    async with subject(terms) as on:
        steps: list[Step] = []
        for name, change, affects in updates:
            steps += await _steps(on, loader, name, change, affects)
        async with oracle(on.stack) as fresh:
            asked = [step.asked for step in steps]
            checked = await fresh.check(asked, roots=len(asked), each=len(asked))
    return [*(_row(step) for step in steps), _texts(checked.answers, len(checked.wrong), checked.roots)]


def _row(step: Step) -> Row:
    goal = f"{step.want} cached"
    measured = f"{step.cached} cached"
    return Row(step.name, goal, measured, step.cached == step.want, f"of {_TOKENS} prompt tokens, in whole pages")


def _texts(count: int, wrong: int, roots: int) -> Row:
    how = f"all answers of this section, {roots} versions, token by token"
    return none_of("texts that differ from a cold run on their version", wrong, count, how)


async def _steps(on: Subject, loader: Loader, name: str, change: Change, affects: bool) -> list[Step]:
    """Its own prompt; cold, warm, after the update, again after it, after the rollback."""
    prompt = loader.prompt(_TOKENS)
    most = (_TOKENS - 1) // PAGE_TOKENS * PAGE_TOKENS  # the last token is always computed
    found = []

    async def again(step: str, want: int) -> None:
        seen = await _ask(on, loader, prompt)
        found.append(Step(f"{name}: {step}", want, Asked(prompt, seen)))

    await again("cold", 0)
    await again("once more", most)
    await commit(on.client.weights, change, Told())
    await settled(on.client.weights)
    await again("after the update", 0 if affects else most)
    await again("once more after it", most)
    await on.client.weights.rollback(STABLE, message="a measurement")
    await settled(on.client.weights)
    await again("after the rollback", most)
    return found


async def _ask(on: Subject, loader: Loader, prompt: tuple[int, ...]) -> Observation:
    """Of the version that the ref names. Raises Failed."""
    root = (await on.client.weights.resolve(STABLE)).root
    body = loader.body(f"{on.model}@{root.hex()}", prompt, _NEW_TOKENS)
    seen = await ask(on.http, on.url, body, 0.0, time.perf_counter(), _ANSWER_S)
    if not seen.ok:
        raise Failed(f"an answer failed: {seen.error}")
    return seen
