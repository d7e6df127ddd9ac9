"""Arguments, the run, and its report."""

from __future__ import annotations

import argparse
import asyncio
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict

import aiohttp

from loadtest.arrivals import poisson
from loadtest.client import Observation, ask, session
from loadtest.handoff.pairs import MODES
from loadtest.interference.summary import Figures, Slo, figures, pooled
from loadtest.markdown import markdown
from loadtest.measurement import options, parsed, parser, report
from loadtest.prompts import Prompts, completion
from loadtest.stack import Refused, Stack, stack

_ANSWER_S = 300.0
_CONTEXT_TOKENS = 64
_PROMPT_NEW_TOKENS = 8


def arguments(argv: list[str]) -> argparse.Namespace:
    about = "Steady decode streams while long prompts arrive (Poisson), disaggregated and colocated in turn."
    made = parser("interference", about, 3)
    made.add_argument("--streams", type=int, default=4, help="that decode all the time (default: %(default)s)")
    made.add_argument("--stream-tokens", type=int, default=128, help="of each answer (default: %(default)s)")
    made.add_argument("--prompt-tokens", type=int, default=1536, help="of the arriving ones (default: %(default)s)")
    made.add_argument("--rate", type=float, default=0.1, help="of their arrival, a second (default: %(default)s)")
    made.add_argument("--duration", type=float, default=60.0, help="seconds of each run (default: %(default)s)")
    made.add_argument("--slo-itl-ms", type=float, default=150.0, help="p99 of a stream (default: %(default)s)")
    made.add_argument("--slo-ttft-ms", type=float, default=8000.0, help="of a long prompt (default: %(default)s)")
    return parsed(made, argv)


def main(argv: list[str]) -> int:
    given = arguments(argv)
    rounds, refused = asyncio.run(measure(given))
    found = {mode: asdict(pooled(own)) for mode, own in rounds.items() if own}
    each = {mode: [asdict(one) for one in own] for mode, own in rounds.items()}
    report(given, render(found, refused), {"medians": found, "refused": refused, "rounds": each})
    return 0 if found else 1


async def measure(given: argparse.Namespace) -> tuple[dict[str, list[Figures]], dict[str, str]]:
    """Mode -> figures of each round, and mode -> why the stack refused it."""
    prompts = Prompts.of(given.model)
    found: dict[str, list[Figures]] = {mode: [] for mode in MODES}
    refused: dict[str, str] = {}
    for number in range(given.rounds):
        for mode, flags in MODES.items():
            if mode in refused:
                continue
            try:
                async with stack(*options(given), *flags) as running, session() as http:
                    found[mode].append(await _run(running, http, prompts, given, number))
            except Refused as error:
                refused[mode] = str(error)
                continue
            print(f"round {number + 1} {mode}: {found[mode][-1]}", file=sys.stderr, flush=True)
    return found, refused


async def _run(
    running: Stack, http: aiohttp.ClientSession, prompts: Prompts, given: argparse.Namespace, number: int
) -> Figures:
    model, url = running.model, running.url
    warm = completion(model, prompts.draw(f"warm-up/{number}", given.prompt_tokens), 4)
    await ask(http, url, warm, 0.0, time.perf_counter(), _ANSWER_S)
    start = time.perf_counter()
    arrivals = poisson(given.rate, given.duration, number) or [given.duration / 2]

    async def stream(index: int) -> list[Observation]:
        answers: list[Observation] = []
        while (now := time.perf_counter() - start) < given.duration:
            label = f"stream/{number}/{index}/{len(answers)}"
            body = completion(model, prompts.draw(label, _CONTEXT_TOKENS), given.stream_tokens)
            answers.append(await ask(http, url, body, now, start, _ANSWER_S))
        return answers

    async def prompt(index: int, due_s: float) -> Observation:
        body = completion(model, prompts.draw(f"long/{number}/{index}", given.prompt_tokens), _PROMPT_NEW_TOKENS)
        await asyncio.sleep(max(0.0, due_s - (time.perf_counter() - start)))
        return await ask(http, url, body, due_s, start, _ANSWER_S)

    streams = asyncio.gather(*(stream(index) for index in range(given.streams)))
    longs = await asyncio.gather(*(prompt(index, due_s) for index, due_s in enumerate(arrivals)))
    answers = [answer for own in await streams for answer in own]
    slo = Slo(given.slo_itl_ms, given.slo_ttft_ms)
    return figures(answers, longs, time.perf_counter() - start, slo)


def render(found: dict[str, dict[str, float]], refused: dict[str, str]) -> str:
    head = ["stack", "ITL p50 ms", "ITL p99 ms", "TTFT p50 ms", "TTFT p99 ms", "goodput tok/s", "all tok/s", "failed"]
    names: Sequence[str] = tuple(Figures.__dataclass_fields__)
    rows = [[mode, *(f"{figure[name]:.0f}" for name in names)] for mode, figure in found.items()]
    lines = [markdown(head, rows)]
    if found.keys() == MODES.keys():
        apart, together = found["disaggregated"], found["colocated"]
        lines.append(
            f"disaggregated against colocated: ITL p99 {apart['itl_p99_ms'] / together['itl_p99_ms'] - 1:+.0%}, "
            f"goodput {apart['goodput_tokens_per_s'] / max(together['goodput_tokens_per_s'], 1e-9) - 1:+.0%}, "
            f"TTFT p50 {apart['ttft_p50_ms'] / together['ttft_p50_ms'] - 1:+.0%}"
        )
    lines += [f"{mode}: not measured, `pdbus up` refused it: {why}" for mode, why in refused.items()]
    return "\n".join(lines)
