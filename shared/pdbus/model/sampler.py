"""Chooses the next token of one sequence from its logits. No torch here: one row at a time, so no batch can matter.

In order: repetition, presence and frequency penalties; logit bias; temperature; top-k; top-p (of what top-k left);
min-p; one draw. At temperature 0 the largest biased logit wins, the lowest id among equals.

The draw is a counter-based random number (Philox4x64-10, Salmon et al. 2011), keyed by (seed, choice) with the output
index as its counter. So any worker that is given the delivered tokens continues with the same text.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from pdbus.errors import Corrupt
from pdbus.messages.common import Sampling
from pdbus.messages.router import TokenLogprob

Floats: TypeAlias = "NDArray[np.float64]"
Logits: TypeAlias = "NDArray[np.float32]"
Ids: TypeAlias = "NDArray[np.int64]"

_U64 = (1 << 64) - 1


@dataclass(frozen=True, slots=True)
class Sampled:
    id: int
    logprob: TokenLogprob | None
    """Of the raw logits, where `Sampling.logprobs` asks for it."""


class Sampler:
    """The sampling state of one choice of a request: its settings, and counts of the tokens that penalties look at.

    Ids must be of the vocabulary and settings in their ranges: whoever admits a ticket checks that.
    `prompt` are the tokens before the answer; `delivered` those of the answer that were already sampled elsewhere."""

    def __init__(
        self, sampling: Sampling, *, seed: int, choice: int, prompt: Iterable[int], delivered: Iterable[int] = ()
    ) -> None:
        self._sampling = sampling
        self._key = (seed & _U64, choice & _U64)
        self._seen = set(prompt)
        self._output: Counter[int] = Counter()
        self._index = 0
        for token in delivered:
            self._accept(token)

    @property
    def index(self) -> int:
        """The output index of the token that `choose` chooses next."""
        return self._index

    def choose(self, logits: Logits) -> Sampled:
        """Samples from one row of logits [vocab] and counts the token as output.

        Raises Corrupt where the logits are not finite (then nothing is counted): garbage must not become text."""
        scores = self._scores(logits)
        best = int(scores.argmax())  # a NaN, where there is one
        if not np.isfinite(scores[best]):
            raise Corrupt("the logits are not finite")
        token = best if self._sampling.temperature == 0 else self._draw(scores)
        wanted = self._sampling.logprobs
        logprob = None if wanted is None else token_logprob(logits, token, wanted)
        self._accept(token)
        return Sampled(token, logprob)

    def _accept(self, token: int) -> None:
        self._output[token] += 1
        self._seen.add(token)
        self._index += 1

    def _scores(self, logits: Logits) -> Logits | Floats:
        """Logits after penalties (as vLLM defines them) and bias."""
        sampling = self._sampling
        repetition, presence, frequency = (
            sampling.repetition_penalty,
            sampling.presence_penalty,
            sampling.frequency_penalty,
        )
        if repetition == 1 and presence == 0 and frequency == 0 and not sampling.logit_bias:
            return logits
        scores = logits.astype(np.float64)
        if repetition != 1:  # CTRL, arXiv 1909.05858: over prompt and output
            seen = np.fromiter(self._seen, np.int64, len(self._seen))
            scores[seen] = np.where(scores[seen] > 0, scores[seen] / repetition, scores[seen] * repetition)
        if self._output and (presence or frequency):  # OpenAI's formula: over the output only
            ids = np.fromiter(self._output.keys(), np.int64, len(self._output))
            counts = np.fromiter(self._output.values(), np.int64, len(self._output))
            scores[ids] -= presence + frequency * counts
        for token, bias in sampling.logit_bias:
            scores[token] += bias
        return scores

    def _draw(self, scores: Logits | Floats) -> int:
        ids, mass = candidates(scores, self._sampling)
        held = mass.cumsum()
        # Below the total also after rounding: 1 - 2^-53 takes at least half a unit in the last place off any number.
        at = uniform(self._key, self._index) * held[-1]
        # The first token whose cumulative mass exceeds that: one without mass is never chosen.
        return int(ids[held.searchsorted(at, side="right")])


def candidates(scores: Logits | Floats, sampling: Sampling) -> tuple[Ids, Floats]:
    """What is drawn from: ids, ascending, and their probabilities before normalisation (the largest is 1).

    Among equal probabilities at a cut, lower ids are kept first. The temperature must be above 0."""
    with np.errstate(over="ignore"):  # a tiny temperature: all but the best fall to -inf, which is right
        mass = np.exp((scores.astype(np.float64) - float(scores.max())) / sampling.temperature)
    ids = np.arange(len(mass))
    if 0 < sampling.top_k < len(mass):
        ids = _largest(mass, sampling.top_k)
    if sampling.top_p < 1:
        ids = ids[_largest(mass[ids], _nucleus(mass[ids], sampling.top_p))]
    if sampling.min_p > 0:
        ids = ids[mass[ids] >= sampling.min_p]
    return ids, mass[ids]


def token_logprob(logits: Logits, token: int, top: int) -> TokenLogprob:
    """The log-probability of `token` and of the `top` best ones: log-softmax of the raw logits, before penalties, bias,
    temperature and filters."""
    exact = logits.astype(np.float64)
    peak = exact.max()
    normaliser = peak + np.log(np.exp(exact - peak).sum())
    best = _largest(exact, top)
    best = best[np.argsort(-exact[best], kind="stable")]
    logprobs = exact - normaliser
    return TokenLogprob(float(logprobs[token]), tuple((int(other), float(logprobs[other])) for other in best))


def uniform(key: tuple[int, int], counter: int) -> float:
    """The draw of this counter, in [0, 1): the upper 53 bits of the first word of its Philox block."""
    before = (counter - 1) % (1 << 256)  # numpy counts up before it makes a block
    raw = np.random.Philox(key=np.array(key, np.uint64), counter=before).random_raw()
    return (int(raw) >> 11) / (1 << 53)


def _largest(values: Floats, count: int) -> Ids:
    """Ids of the `count` largest values, ascending; of those equal to the least of them, the lower ids."""
    if not 0 < count < len(values):
        return np.arange(min(count, len(values)))
    least = np.partition(values, -count)[-count]
    chosen = np.asarray(values > least)
    chosen[np.flatnonzero(values == least)[: count - int(np.count_nonzero(chosen))]] = True
    return np.flatnonzero(chosen)


def _nucleus(mass: Floats, top_p: float) -> int:
    """How many of the largest hold at least `top_p` of the mass, at least one (nucleus, arXiv 1904.09751)."""
    total = mass.sum()
    # All that lie below this hold less than 1 - top_p together, so that none of them is needed, nor has to be sorted.
    floor = (1.0 - top_p) * total / len(mass)
    held = np.sort(mass[mass >= floor])[::-1].cumsum()
    return int(held.searchsorted(top_p * total)) + 1
