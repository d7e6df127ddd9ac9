"""The last check of a ticket's token ids and sampling fields, before they index into anything."""

from __future__ import annotations

import math
from collections.abc import Iterable

from pdbus.errors import InvalidRequest
from pdbus.messages.common import Sampling

MOST_LOGPROBS = 20


def check_tokens(tokens: Iterable[int], vocab_size: int, param: str = "prompt") -> None:
    """Raises InvalidRequest where an id is not of the vocabulary."""
    for token in tokens:
        if not 0 <= token < vocab_size:
            raise InvalidRequest(f"{token} is no token id of this model (0 to {vocab_size - 1})", param=param)


def check_sampling(sampling: Sampling, vocab_size: int) -> None:
    """Raises InvalidRequest that names the first field out of its range."""
    _range("temperature", sampling.temperature, 0.0, math.inf)
    _range("top_k", sampling.top_k, 0, math.inf)
    _range("top_p", sampling.top_p, 0.0, 1.0, above=True)
    _range("min_p", sampling.min_p, 0.0, 1.0)
    _range("repetition_penalty", sampling.repetition_penalty, 0.0, math.inf, above=True)
    _range("presence_penalty", sampling.presence_penalty, -math.inf, math.inf)
    _range("frequency_penalty", sampling.frequency_penalty, -math.inf, math.inf)
    if sampling.logprobs is not None:
        _range("logprobs", sampling.logprobs, 0, MOST_LOGPROBS)
    check_tokens((token for token, _ in sampling.logit_bias), vocab_size, "logit_bias")
    for _, bias in sampling.logit_bias:
        _range("logit_bias", bias, -math.inf, math.inf)


def _range(name: str, value: float, least: float, most: float, *, above: bool = False) -> None:
    if not math.isfinite(value) or not least <= value <= most or (above and value == least):
        bounds = f"{'above' if above else 'from'} {least} to {most}"
        raise InvalidRequest(f"{name} must be a finite number {bounds}, not {value}", param=name)
