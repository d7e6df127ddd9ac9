"""What a token is drawn from: top-k, top-p (of what top-k left), min-p, and the draw. No torch; one row at a time.

The definition is simple (`_all_of`): the mass of every token in fp64, and the largest of them. It costs several passes
over the vocabulary, so that a few candidates are looked at first: all tokens above a bound that costs one pass. Their
masses are the definition's to the bit, and wherever what is left out could change the outcome (a tie at the cut, a sum
that is too near to it) the definition itself decides.
"""

from __future__ import annotations

import math
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from pdbus.messages.common import Sampling

Floats: TypeAlias = "NDArray[np.float64]"
Logits: TypeAlias = "NDArray[np.float32]"
Ids: TypeAlias = "NDArray[np.int64]"

_LAYERS = 64
"""A row is looked at as so many layers, one above the other; the greatest of each column bounds what is below it."""
_FIRST_LOOKS = (128, 640)
"""Candidates for top-p that are looked at before all are."""
_SUM_ERROR = 3e-5
"""Of a sum of exponentials in fp32, relative: numpy's exp errs by less than 3 units in the last place, its argument by
three roundings, which count for at most 3 * 2^-24 * 88 before the exponential is 0."""
_COOLEST = 0.01
"""Below this temperature fp32 does not do for such a sum."""
_APART = 1.0 + 1e-12
"""Masses whose ratio is above this are not equal, nor in another order than their logits, by rounding."""


def candidates(scores: Logits | Floats, sampling: Sampling, peak: float | None = None) -> tuple[Ids, Floats]:
    """What is drawn from: ids, ascending, and their probabilities before normalisation (the largest is 1).

    Among equal probabilities at a cut, lower ids are kept first. The temperature must be above 0. `peak`: the largest
    score, where it is known."""
    peak = float(scores.max()) if peak is None else peak
    found: tuple[Ids, Floats] | None = None
    if 0 < sampling.top_k < len(scores):
        found = _top(scores, peak, sampling)
    elif sampling.top_p < 1:
        found = _nucleus(scores, peak, sampling)
    elif sampling.min_p > 0:
        least = peak + sampling.temperature * (math.log(sampling.min_p) - 1e-3)
        ids = np.flatnonzero(scores >= least - 1e-6 * abs(least))
        found = ids, masses(scores[ids], peak, sampling.temperature)
    ids, mass = found or _all_of(scores, peak, sampling)
    if sampling.min_p > 0:
        kept = mass >= sampling.min_p
        ids, mass = ids[kept], mass[kept]
    return ids, mass


def masses(scores: Logits | Floats, peak: float, temperature: float) -> Floats:
    """exp((score - peak) / temperature) in fp64."""
    mass: Floats = np.subtract(scores, peak, dtype=np.float64)
    with np.errstate(over="ignore"):  # a tiny temperature: all but the best fall to -inf, which is right
        if temperature != 1:
            mass /= temperature
        np.exp(mass, out=mass)
    return mass


def largest(values: Floats | Logits, count: int) -> Ids:
    """Ids of the `count` largest values, ascending; of those equal to the least of them, the lower ids."""
    if not 0 < count < len(values):
        return np.arange(min(count, len(values)))
    listed = shortlist(values, count)
    if len(listed) < len(values):
        return listed[largest(values[listed], count)]
    least = np.partition(values, -count)[-count]
    chosen = np.asarray(values > least)
    chosen[np.flatnonzero(values == least)[: count - int(np.count_nonzero(chosen))]] = True
    return np.flatnonzero(chosen)


def shortlist(values: Floats | Logits, count: int) -> Ids:
    """Ids, ascending, of all values from some bound on that at least `count` reach: usually not many more than that."""
    width = len(values) // _LAYERS
    if count >= width:
        return np.arange(len(values))
    tops = values[: _LAYERS * width].reshape(_LAYERS, width).max(0)
    return np.flatnonzero(values >= np.partition(tops, width - count)[width - count])


def drawn(mass: Floats, number: float) -> int:
    """The first index at which the cumulative mass exceeds `number` (of [0, 1)) times the whole: one without mass is
    never chosen."""
    size = len(mass) // _LAYERS
    if size >= _LAYERS:  # a running sum over all is slow: over blocks, then within one, as far as rounding allows
        blocks = mass[: _LAYERS * size].reshape(_LAYERS, size).sum(1).cumsum()
        whole = blocks[-1] + mass[_LAYERS * size :].sum()
        at, error = number * whole, len(mass) * 2.0**-51 * whole
        block = int(blocks.searchsorted(at, side="right"))
        held = mass[block * size : (block + 1) * size].cumsum() + (blocks[block - 1] if block else 0.0)
        found = int(held.searchsorted(at + error, side="right"))
        before = held[found - 1] if found else (blocks[block - 1] if block else -np.inf)
        if found < len(held) and before < at - error:
            return block * size + found
    held = mass.cumsum()
    # Below the total also after rounding: 1 - 2^-53 takes at least half a unit in the last place off any number.
    return int(held.searchsorted(number * held[-1], side="right"))


def _all_of(scores: Logits | Floats, peak: float, sampling: Sampling) -> tuple[Ids, Floats]:
    """The definition, less min-p."""
    mass = masses(scores, peak, sampling.temperature)
    ids = np.arange(len(mass))
    if 0 < sampling.top_k < len(mass):
        ids = largest(mass, sampling.top_k)
    if sampling.top_p < 1:
        kept = mass[ids]
        total = float(kept.sum())
        # All below this hold less than 1 - top_p together, so that none of them is needed, nor has to be sorted.
        floor = (1.0 - sampling.top_p) * total / len(kept)
        ids = ids[largest(kept, _cut(_held(kept[kept >= floor]), sampling.top_p * total))]
    return ids, mass[ids]


def _top(scores: Logits | Floats, peak: float, sampling: Sampling) -> tuple[Ids, Floats] | None:
    """Top-k and top-p by a shortlist; None where the definition has to decide."""
    listed = shortlist(scores, sampling.top_k + 1)
    if len(listed) == len(scores):
        return None
    mass = masses(scores[listed], peak, sampling.temperature)
    kept = largest(mass, sampling.top_k)
    if not mass[kept].min() > mass.min() * _APART:
        return None
    ids, mass = listed[kept], mass[kept]
    if sampling.top_p < 1:
        kept = largest(mass, _cut(_held(mass), sampling.top_p * float(mass.sum())))
        ids, mass = ids[kept], mass[kept]
    return ids, mass


def _nucleus(scores: Logits | Floats, peak: float, sampling: Sampling) -> tuple[Ids, Floats] | None:
    """Top-p (nucleus, arXiv 1904.09751) by a shortlist; None where the definition has to decide."""
    temperature, top_p = sampling.temperature, sampling.top_p
    total, error = _rough_sum(scores, peak, temperature), _SUM_ERROR
    for look in _FIRST_LOOKS:
        listed = shortlist(scores, look)
        if len(listed) == len(scores):
            return None
        mass = masses(scores[listed], peak, temperature)
        held = _held(mass)
        if held[-1] < top_p * total * (1.0 - error):
            continue
        if _cut(held, top_p * total * (1.0 - error)) != _cut(held, top_p * total * (1.0 + error)):
            total, error = float(masses(scores, peak, temperature).sum()), 0.0
        count = _cut(held, top_p * total)
        kept = largest(mass, count)
        if count < len(mass) and mass[kept].min() > mass.min() * _APART:
            return listed[kept], mass[kept]
    return None


def _rough_sum(scores: Logits | Floats, peak: float, temperature: float) -> float:
    """Of all masses, but for a relative error of _SUM_ERROR."""
    if scores.dtype != np.float32 or temperature < _COOLEST:
        return float(masses(scores, peak, temperature).sum())
    mass = np.subtract(scores, np.float32(peak))
    mass /= np.float32(temperature)
    return float(np.exp(mass, out=mass).sum())


def _held(mass: Floats) -> Floats:
    """The running sum of masses, the largest first."""
    return np.sort(mass)[::-1].cumsum()


def _cut(held: Floats, wanted: float) -> int:
    """How many of the largest hold at least that much, at least one."""
    return int(held.searchsorted(wanted)) + 1
