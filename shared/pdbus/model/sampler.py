"""Chooses the next token of one sequence from its logits. No torch here: each row for itself, so no batch can matter.

In order: repetition, presence and frequency penalties; logit bias; temperature; top-k, top-p and min-p
(model/candidates.py); one draw. At temperature 0 the largest biased logit wins, the lowest id among equals.

The draw is a counter-based random number (Philox4x64-10, Salmon et al. 2011), keyed by (seed, choice) with the output
index as its counter. So any worker that is given the delivered tokens continues with the same text.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from pdbus.errors import Corrupt
from pdbus.messages.common import Sampling
from pdbus.messages.router import TokenLogprob
from pdbus.model.candidates import Floats, Ids, Logits, candidates, drawn, largest, masses

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

    def choose(self, logits: Logits, best: int | None = None) -> Sampled:
        """Samples from one row of logits [vocab] and counts the token as output. `best`: as `best_of` found it.

        Raises Corrupt where the logits are not finite (then nothing is counted): garbage must not become text."""
        scores = self._scores(logits)
        if best is None or scores is not logits:
            best = int(scores.argmax())
        peak = float(scores[best])
        if not math.isfinite(peak):
            raise Corrupt("the logits are not finite")
        token = best if self._sampling.temperature == 0 else self._draw(scores, peak)
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

    def _draw(self, scores: Logits | Floats, peak: float) -> int:
        ids, mass = candidates(scores, self._sampling, peak)
        return int(ids[drawn(mass, uniform(self._key, self._index))])


def best_of(logits: Logits) -> Ids:
    """The best token of each row of logits [rows, vocab], the lowest id among equals; a NaN, where a row has one."""
    best: Ids = logits.argmax(1)
    return best


def token_logprob(logits: Logits, token: int, top: int) -> TokenLogprob:
    """The log-probability of `token` and of the `top` best ones: log-softmax of the raw logits, before penalties, bias,
    temperature and filters."""
    peak = float(logits.max())
    normaliser = peak + np.log(masses(logits, peak, 1.0).sum())

    def logprob(id: int) -> float:
        return float(np.float64(logits[id]) - normaliser)

    best = largest(logits, top)
    best = best[np.argsort(-logits[best], kind="stable")]
    return TokenLogprob(logprob(token), tuple((id, logprob(id)) for id in best.tolist()))


def uniform(key: tuple[int, int], counter: int) -> float:
    """The draw of this counter, in [0, 1): the upper 53 bits of the first word of its Philox block."""
    before = (counter - 1) % (1 << 256)  # numpy counts up before it makes a block
    raw = np.random.Philox(key=np.array(key, np.uint64), counter=before).random_raw()
    return (int(raw) >> 11) / (1 << 53)
