"""What of each running sequence is computed in a step. Pure."""

from __future__ import annotations

from collections.abc import Hashable
from collections.abc import Sequence as Many
from dataclasses import dataclass

from pdbus.engine.pace import Pace
from pdbus.engine.sequence import LayerReady, Sequence
from pdbus.engine.tenants import Tenants
from pdbus.errors import PdbusError
from pdbus.messages.common import Digest


@dataclass(frozen=True, slots=True)
class Chunk:
    """Compute `tokens` tokens of the sequence from its first uncomputed one on, in the layers from `first_layer` on."""

    sequence: Sequence
    tokens: int
    first_layer: int = 0

    @property
    def last(self) -> bool:
        """All known tokens are computed after it: the next one can be sampled."""
        return self.tokens == self.sequence.remaining

    def layer_ready(self, layer: int) -> LayerReady:
        """What is told of it, before it is counted as computed."""
        return LayerReady(self.sequence, layer, self.sequence.computed, self.tokens)


@dataclass(frozen=True, slots=True)
class Turn:
    """One round: what started, what ended without being computed, and what to compute, in separate passes."""

    started: tuple[Sequence, ...]
    failed: tuple[tuple[Sequence, PdbusError], ...]
    groups: tuple[tuple[Chunk, ...], ...]


def prompt_tokens(group: Many[Chunk]) -> int:
    """Of a pass, however many prompts they are of: all but the answers' one token each."""
    return sum(chunk.tokens for chunk in group if chunk.tokens > 1)


def wait_for(early: Many[Chunk], layer: int) -> None:
    """Returns once the layer's cached KV is there that these need. Raises Late."""
    for chunk in early:
        if chunk.sequence.arriving:
            chunk.sequence.arriving.wait(layer)


def chunks_of(running: Many[Sequence], pace: Pace, page_tokens: int, turn: int, tenants: Tenants) -> tuple[Chunk, ...]:
    """Answers first, one token each; then what interrupted ones had come to, one after another; prompts as the tenants
    share the rest of the step (engine/tenants.py). `turn` numbers the step."""
    active = [one for one in running if (one.ready or one.arriving) and not one.cancelled]
    prompts = sorted((one for one in active if one.remaining > 1), key=lambda one: one.served)
    answers = [one for one in active if one.remaining == 1]
    adds = tenants.adding(answers)
    answers, others = [one for one in answers if not adds(one)], [one for one in answers if adds(one)]
    prompts, more = [one for one in prompts if not adds(one)], [one for one in prompts if adds(one)]
    answers = tenants.in_step(answers, pace.answers(beside_prompts=bool(prompts)))
    tokens = dict.fromkeys(answers, 1)
    interrupted = [one for one in prompts if one.interrupted]
    tokens |= _in_turn(interrupted, pace.interrupted_tokens(len(answers)), page_tokens)
    used = sum(tokens.values()) - len(answers)
    for group in tenants.grouped(one for one in prompts if not one.interrupted):
        budget = pace.prompt_tokens(tenants.no_heavier(group, answers), brief=tenants.brief(group)) - used
        shared = _shared(group, max(budget, 0), page_tokens)
        used += sum(shared.values())
        tokens |= shared
    if others or more:
        tokens |= _beside(others, more, pace.rows_beside(len(answers), used), tenants)
    chosen = [one for one in active if tokens.get(one)]
    for sequence in chosen:
        sequence.served = turn
    return tuple(Chunk(one, tokens[one], _first_layer(one)) for one in chosen)


def _beside(answers: list[Sequence], prompts: Many[Sequence], rows: int, tenants: Tenants) -> dict[Sequence, int]:
    """So many tokens in all, for those who flood the step. Where less than a page is left for a prompt, that is read by
    fewer tokens, unless it has to be handed over by pages."""
    tokens = dict.fromkeys(tenants.shared(answers, rows), 1)
    rows -= len(tokens)
    for sequence in tenants.first(sorted(prompts, key=lambda one: one.admitted)):  # to the end, one after another
        if rows and not sequence.handoff and not sequence.arriving:
            most = sequence.resumed - sequence.computed if _first_layer(sequence) else sequence.remaining
            tokens[sequence] = min(rows, most)
            rows -= tokens[sequence]
    return tokens


def _in_turn(prompts: Many[Sequence], budget: int, page_tokens: int) -> dict[Sequence, int]:
    """Those that are soonest done first."""
    tokens: dict[Sequence, int] = {}
    for sequence in sorted(prompts, key=lambda one: (-one.ticket.priority, one.remaining)):
        tokens[sequence] = _cut(sequence, budget, page_tokens)
        budget -= tokens[sequence]
    return tokens


def _shared(prompts: Many[Sequence], budget: int, page_tokens: int) -> dict[Sequence, int]:
    """Prompts share the budget evenly, those that wait longest first: where it is not enough for all of them, each gets
    its turn. What they leave goes to the first ones."""
    tokens: dict[Sequence, int] = {}
    share = max(budget // len(prompts), page_tokens)
    for sequence in prompts:
        tokens[sequence] = _cut(sequence, min(share, budget), page_tokens)
        budget -= tokens[sequence]
    for sequence in prompts:
        more = _cut(sequence, tokens[sequence] + budget, page_tokens) - tokens[sequence]
        tokens[sequence] += more
        budget -= more
    return tokens


def passes_of(chunks: Many[Chunk]) -> tuple[tuple[Chunk, ...], ...]:
    """What can be computed in one step: versions of one kind, those of a root side by side, from the same layer on."""
    by_root: dict[tuple[Digest, int], list[Chunk]] = {}
    for chunk in chunks:
        by_root.setdefault((chunk.sequence.ticket.root, chunk.first_layer), []).append(chunk)
    if len(by_root) == 1:
        return tuple(map(tuple, by_root.values()))
    passes: dict[Hashable, list[Chunk]] = {}
    for (_, layer), own in by_root.items():
        passes.setdefault((own[0].sequence.version.model.kind, layer), []).extend(own)
    return tuple(map(tuple, passes.values()))


def _first_layer(sequence: Sequence) -> int:
    return sequence.resume_layer if sequence.computed < sequence.resumed else 0


def _cut(sequence: Sequence, tokens: int, page_tokens: int) -> int:
    """The largest chunk of at most `tokens` tokens that ends at a page boundary or at the sequence's end, and begins
    with the same layer throughout."""
    if _first_layer(sequence):
        tokens = min(tokens, sequence.resumed - sequence.computed)
    if tokens >= sequence.remaining:
        return sequence.remaining
    return max((sequence.computed + tokens) // page_tokens * page_tokens - sequence.computed, 0)
