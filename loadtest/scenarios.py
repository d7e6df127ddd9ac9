"""What is asked: each scenario draws the bodies of one kind of traffic, repeatably from a seed."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

Body = dict[str, Any]

_TEXT = (
    "river stone market winter engine letter garden signal copper morning bridge paper window captain forest theory "
    "harbour village number colour machine silver island question doctor season mirror ladder valley music"
)
_WORDS = _TEXT.split()

_SYSTEM = (
    "You are the support assistant of a small railway company. Answer in one or two sentences, name the station where "
    "it matters, never promise a refund, and ask for the ticket number when the question is about a booking."
)


@dataclass(frozen=True)
class Scenario:
    """`draw(rng, number)` makes the body of one chat completion; `number` counts the run's requests."""

    name: str
    about: str
    draw: Callable[[random.Random, int], Body]


def words(rng: random.Random, count: int) -> str:
    """`count` everyday words."""
    return " ".join(rng.choice(_WORDS) for _ in range(count))


def _chat(messages: list[dict[str, str]], max_tokens: int, **more: Any) -> Body:
    return {"messages": messages, "max_tokens": max_tokens, "temperature": 0, **more}


def _short(rng: random.Random, number: int) -> Body:
    return _chat([{"role": "user", "content": f"({number}) In one line: why {words(rng, 6)}?"}], 32)


def _long(rng: random.Random, number: int) -> Body:
    text = words(rng, 380)
    return _chat([{"role": "user", "content": f"({number}) Sum up in one line: {text}"}], 32)


def _shared(rng: random.Random, number: int) -> Body:
    question = f"({number}) My train to {rng.choice(_WORDS)} is late, what about {words(rng, 4)}?"
    return _chat([{"role": "system", "content": _SYSTEM}, {"role": "user", "content": question}], 32)


def _sampled(rng: random.Random, number: int) -> Body:
    body = _chat([{"role": "user", "content": f"({number}) Tell a story about {words(rng, 3)}."}], 64)
    return body | {"temperature": 0.8, "top_p": 0.95, "seed": rng.randrange(1 << 31)}


def _repeated(rng: random.Random, number: int) -> Body:
    """A few questions come again and again, as a Zipf law has it: what a result cache is for."""
    rank = min(int(rng.paretovariate(1.1)), 50)
    return _chat([{"role": "user", "content": f"Question {rank}: what is a {_WORDS[rank % len(_WORDS)]}?"}], 24)


def _mixed(rng: random.Random, number: int) -> Body:
    return rng.choices((_short, _shared, _sampled, _long), weights=(4, 3, 2, 1))[0](rng, number)


SCENARIOS: dict[str, Scenario] = {
    scenario.name: scenario
    for scenario in (
        Scenario("short", "distinct short questions, 32 tokens each", _short),
        Scenario("long", "distinct prompts of about 512 tokens, 32 tokens each", _long),
        Scenario("shared", "one system prompt, many short questions", _shared),
        Scenario("sampled", "seeded sampling, 64 tokens each", _sampled),
        Scenario("repeated", "few questions, asked again and again (Zipf)", _repeated),
        Scenario("mixed", "a mix of the first four", _mixed),
    )
}
