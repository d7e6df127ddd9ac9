"""The comparison of engines: interleaved rounds, medians, ratios and shares of the memory's bandwidth."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

import pytest

from loadtest.engine.columns import COLUMNS, Column, Task, bandwidth_share, chosen, decode_rate, prefill_rate, tasks
from loadtest.engine.rounds import Row, run_rounds
from loadtest.engine.table import RSS, Comparison, render
from loadtest.peers.base import Clock, Prompts, Shape, Timing, Unusable, Weights

TASK = Task("t", 100, 11)
PREFILL, DECODE = Column("prefill", TASK, prefill_rate), Column("decode", TASK, decode_rate, decode=True)
WEIGHTS = Weights(1000, 10)


@dataclass
class Fake:
    """Takes ever longer; fails in one round if told so."""

    name: str
    log: list[str]
    fails_in: int = -1
    weights: Weights = WEIGHTS
    peak_bytes: int = 5_000_000
    turns: int = 0
    asked: list[tuple[Prompts, int]] = field(default_factory=list)

    @asynccontextmanager
    async def running(self) -> AsyncIterator[Fake]:
        self.log.append(self.name)
        self.turns += 1
        yield self

    async def generate(self, prompts: Prompts, new_tokens: int) -> Timing:
        if self.turns == self.fails_in:
            raise Unusable("it broke")
        self.asked.append((prompts, new_tokens))
        return Timing(float(self.turns), self.turns + 1.0, new_tokens)


def draw(label: str, tokens: int) -> list[int]:
    return [hash(label)] * tokens


async def test_rounds_take_turns_and_keep_a_figure_of_each() -> None:
    log: list[str] = []
    first, second = Fake("a", log), Fake("b", log)
    rows = await run_rounds([first, second], [PREFILL, DECODE], 3, draw, lambda line: None)
    assert log == ["a", "b", "b", "a", "a", "b"]
    assert rows[0].figures == {"prefill": [100.0, 50.0, pytest.approx(100 / 3)], "decode": [10.0, 10.0, 10.0]}
    assert [row.name for row in rows] == ["a", "b"]


async def test_all_engines_get_the_same_prompts_new_ones_each_round() -> None:
    first, second = Fake("a", []), Fake("b", [])
    await run_rounds([first, second], [PREFILL], 2, draw, lambda line: None)
    assert first.asked == second.asked
    prompts = [tuple(prompts[0]) for prompts, new_tokens in first.asked]
    assert len(set(prompts)) == len(prompts)  # warm-ups too: nothing is measured on a prompt that was seen before


async def test_an_engine_that_fails_is_left_out_with_the_reason() -> None:
    broken, sound = Fake("broken", [], fails_in=2), Fake("sound", [])
    told: list[str] = []
    rows = await run_rounds([broken, sound], [PREFILL], 3, draw, told.append)
    assert rows[0].unusable == "it broke"
    assert broken.turns == 2
    assert len(rows[1].figures["prefill"]) == 3
    assert any("broken" in line and "it broke" in line for line in told)


def comparison() -> Comparison:
    rows = [
        Row("ours", {"prefill": [120.0, 100.0, 110.0], "decode": [30.0]}, 2_000_000, WEIGHTS),
        Row("slow", {"prefill": [50.0], "decode": [20.0]}, 1_000_000, WEIGHTS),
        Row("fast", {"prefill": [100.0], "decode": [10.0]}, 4_000_000, WEIGHTS),
        Row("gone", unusable="not installed"),
    ]
    return Comparison.of([PREFILL, DECODE], rows, ["ours"], 100_000)


def test_ratios_are_medians_against_the_best_peer_of_each_column() -> None:
    found = comparison()
    assert found.best() == {"prefill": ("fast", 100.0), "decode": ("slow", 20.0), RSS: ("slow", 1.0)}
    assert found.ratios() == {"ours": {"prefill": 1.1, "decode": 1.5, RSS: 2.0}}
    assert found.ratios("fast") == {"ours": {"prefill": 1.1, "decode": 3.0, RSS: 0.5}}
    assert found.ratios("nobody") == {"ours": {}}


def test_the_report_names_figures_ratios_shares_and_who_is_left_out() -> None:
    text = render(comparison(), ["fast"])
    for wanted in ("ours ÷ best peer", "ours ÷ fast", "**100**", "gone: not installed", "share of"):
        assert wanted in text


def test_answers_are_held_against_the_reference_until_they_differ() -> None:
    rows = [
        Row("reference", ids={"t": [(1, 2, 3, 4), (5, 6, 7, 8)]}),
        Row("same", ids={"t": [(1, 2, 3, 4), (5, 6, 7, 8)]}),
        Row("half", ids={"t": [(1, 2, 3, 4), (9, 6, 7, 8)]}),
        Row("silent", ids={"t": [(), ()]}),
    ]
    found = Comparison.of([PREFILL], rows, [], 1.0)
    assert found.agreement("reference") == {"same": 1.0, "half": 0.5}
    assert found.agreement("nobody") == {}


def test_a_share_counts_weights_and_the_context() -> None:
    # A step reads 1000 bytes of weights and 100 to 111 tokens of 10 bytes.
    assert bandwidth_share(DECODE, 2.0, WEIGHTS, 10_000) == pytest.approx(2 * (1000 + 105.5 * 10) / 10_000)


def test_columns_by_name_and_the_tasks_that_they_need() -> None:
    assert chosen([]) == COLUMNS
    both = chosen(["prefill@512", "decode@512"])
    assert len(tasks(both)) == 1
    with pytest.raises(ValueError, match="no column decode@7"):
        chosen(["decode@7"])


def test_sizes_of_the_default_model() -> None:
    config: dict[str, int | bool | None] = {
        "hidden_size": 576,
        "intermediate_size": 1536,
        "num_hidden_layers": 30,
        "num_attention_heads": 9,
        "num_key_value_heads": 3,
        "head_dim": 64,
        "vocab_size": 49152,
    }
    shape = Shape.of(config)
    assert shape.kv_values * 2 == 23_040  # bytes a token in fp16
    assert shape.parameters == pytest.approx(134_515_008, rel=0.001)  # without norms
    assert shape.weights(bits=4, kv_bytes=2).weight_bytes == shape.parameters // 2


def test_a_clock_that_heard_nothing_is_no_timing() -> None:
    with pytest.raises(Unusable):
        Clock().timing([])
    clock = Clock()
    clock.token()
    clock.token()
    timing = clock.timing([7, 8])
    assert (timing.new_tokens, timing.ids) == (2, (7, 8))
    assert 0 < timing.first_s <= timing.total_s
