"""Answers of a prefill and a decode worker equal those of the model alone, whatever else goes on."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest

from pdbus.engine.invalidations import drop_pages
from pdbus.engine.rates import Rates
from pdbus.messages.common import Sampling
from pdbus.model.backend import Model
from tests.support.asking import ids, until
from tests.support.llama import Runner
from tests.support.ring import Ring, fleet_of
from tests.support.workers import Rig, paused, prompt_of

SAMPLED = Sampling(temperature=1.2, top_p=0.95, repetition_penalty=1.1, frequency_penalty=0.2, presence_penalty=0.1)


async def test_an_answer_equals_the_model_alone(workers: Rig, model: Model) -> None:
    prompt = prompt_of(70)
    ticket = workers.router.ticket(prompt, 12)
    items = await workers.router.answer(ticket)
    assert ids(items) == Runner(model).greedy(prompt, 12)
    assert [item.finish for item in items] == [None] * 11 + ["length"]
    assert [item.index for item in items] == list(range(12))
    assert {item.root for item in items} == {ticket.root}
    assert items[0].cached_tokens == 0


async def test_answers_do_not_depend_on_what_else_is_computed(workers: Rig, model: Model) -> None:
    prompts = [prompt_of(length, seed) for seed, length in enumerate((1, 15, 16, 17, 31, 33, 64, 100))]
    router = workers.router
    answers = await asyncio.gather(*(router.answer(router.ticket(prompt, 10)) for prompt in prompts))
    assert [ids(items) for items in answers] == [Runner(model).greedy(prompt, 10) for prompt in prompts]


async def test_a_cached_prefix_changes_nothing_but_the_work(workers: Rig, model: Model) -> None:
    router, prefix = workers.router, prompt_of(80)
    await router.answer(router.ticket(prefix, 2))
    for tail, cached in (([5, 6, 7], 80), ([], 64), (prompt_of(40, 9), 80)):
        items = await router.answer(router.ticket(prefix + tail, 8))
        assert items[0].cached_tokens == cached
        assert ids(items) == Runner(model).greedy(prefix + tail, 8)


async def test_a_prefix_from_the_cache_nodes_changes_nothing_but_the_work(workers: Rig, model: Model) -> None:
    router, prompt, ring = workers.router, prompt_of(90), Ring()
    tier, versions, core = workers.prefill.l2, workers.prefill.versions, workers.prefill.core
    tier._ring = tier._write_back._ring = ring  # type: ignore[assignment]
    tier._fleet = fleet_of(1)
    await router.answer(router.ticket(prompt, 1))
    await until(lambda: ring.puts == 5)
    await drop_pages(router.root, versions, core)
    tier.rates = Rates(core.pool.format.page_bytes, 16)  # a tiny model is faster than any tier
    items = await router.answer(router.ticket(prompt, 8))
    assert items[0].cached_tokens == 80
    assert ids(items) == Runner(model).greedy(prompt, 8)
    other = await router.answer(router.ticket(prompt, 1, root=workers.source.root_of["b"]))
    assert other[0].cached_tokens == 0


async def test_another_tenant_never_hits_a_prefix(workers: Rig) -> None:
    router, prompt = workers.router, prompt_of(80)
    await router.answer(router.ticket(prompt, 2, salt=b"one"))
    items = await router.answer(router.ticket(prompt, 2, salt=b"two"))
    assert items[0].cached_tokens == 0


async def test_choices_of_one_request_compute_their_prompt_once(workers: Rig) -> None:
    router = workers.router
    first = router.ticket(prompt_of(100), 6, sampling=SAMPLED)
    tickets = [replace(first, choice=choice) for choice in range(4)]
    answers = await asyncio.gather(*(router.answer(ticket) for ticket in tickets))
    assert sorted(items[0].cached_tokens or 0 for items in answers) == [0, 96, 96, 96]
    assert len({tuple(ids(items)) for items in answers}) > 1


async def test_two_versions_are_served_side_by_side_and_never_mixed(
    workers: Rig, model: Model, other_model: Model
) -> None:
    router, prompt = workers.router, prompt_of(48)
    other = workers.source.root_of["b"]
    tickets = [router.ticket(prompt, 10, root=root) for root in (router.root, other) * 3]
    answers = await asyncio.gather(*(router.answer(ticket) for ticket in tickets))
    alone = {router.root: Runner(model).greedy(prompt, 10), other: Runner(other_model).greedy(prompt, 10)}
    assert alone[router.root] != alone[other]
    assert [ids(items) for items in answers] == [alone[ticket.root] for ticket in tickets]
    assert all(item.root == ticket.root for ticket, items in zip(tickets, answers, strict=True) for item in items)


async def test_a_later_attempt_goes_on_with_the_same_text(workers: Rig) -> None:
    router = workers.router
    ticket = router.ticket(prompt_of(40), 12, sampling=SAMPLED, seed=1234)
    whole = ids(await router.answer(ticket))
    for delivered in (1, 5, 11):
        later = replace(
            ticket, request_id=f"{ticket.request_id}-{delivered}", attempt=2, delivered=tuple(whole[:delivered])
        )
        items = await router.answer(later)
        assert [item.index for item in items] == list(range(delivered, 12))
        assert ids(items) == whole[delivered:]


@pytest.mark.parametrize("at", [0, 4])
async def test_a_stop_id_ends_the_answer_and_is_not_part_of_it(workers: Rig, model: Model, at: int) -> None:
    prompt = prompt_of(30, seed=3)
    alone = Runner(model).greedy(prompt, 8)
    stop = alone[at]
    expected = alone[: alone.index(stop)]
    items = await workers.router.answer(workers.router.ticket(prompt, 8, stop_ids=(stop,)))
    assert ids(items) == expected
    assert items[-1].finish == "stop"
    assert items[-1].ids == ()


async def test_a_single_token_needs_no_decode_worker(workers: Rig, model: Model) -> None:
    prompt = prompt_of(20)
    ticket = workers.router.ticket(prompt, 1)
    items = await workers.router.answer(ticket)
    assert (ids(items), items[0].finish) == (Runner(model).greedy(prompt, 1), "length")


async def test_the_context_ends_the_answer(workers: Rig, model: Model) -> None:
    most = model.config.max_positions
    items = await workers.router.answer(workers.router.ticket(prompt_of(most - 5), 100))
    assert (len(ids(items)), items[-1].finish) == (5, "length")


async def test_log_probabilities_of_prompt_and_answer(workers: Rig, model: Model) -> None:
    router, prompt = workers.router, prompt_of(50)
    await router.answer(router.ticket(prompt, 1))  # what is cached must not be used
    wanted = Sampling(temperature=0.0, logprobs=2)
    items = await router.answer(router.ticket(prompt, 3, sampling=wanted, prompt_logprobs=1))
    runner = Runner(model)
    tokens = prompt + ids(items)
    exact = runner.logits(tokens).double().log_softmax(-1)  # [tokens, vocab]
    told = [*(items[0].prompt_logprobs or ()), *(one for item in items for one in item.logprobs)]
    assert len(told) == len(tokens) - 1
    for row, one in enumerate(told):
        assert one.logprob == pytest.approx(float(exact[row, tokens[row + 1]]), abs=1e-3)
        assert one.top[0][1] == pytest.approx(float(exact[row].max()), abs=1e-3)
    assert items[0].cached_tokens == 0
    assert all(item.prompt_logprobs is None for item in items[1:])


async def test_only_the_prompts_log_probabilities(workers: Rig) -> None:
    ticket = workers.router.ticket(prompt_of(40), 0, prompt_logprobs=0)
    (item,) = await workers.router.answer(ticket)
    assert (item.ids, item.finish, len(item.prompt_logprobs or ())) == ((), "length", 39)


async def test_one_frame_carries_a_steps_tokens_of_a_router(workers: Rig) -> None:
    router = workers.router
    tickets = [router.ticket(prompt_of(16, seed), 40) for seed in range(6)]
    with paused(workers.decode):  # all come to the same first turn
        answers = [asyncio.create_task(router.answer_local(ticket)) for ticket in tickets]
        await until(lambda: workers.decode.core.live == len(tickets))
    await asyncio.gather(*answers)
    by_decode = [frame for frame in router.frames if frame.worker == router.decode]
    assert [frame.seq for frame in by_decode] == list(range(len(by_decode)))
    assert max(len(frame.items) for frame in by_decode) >= len(tickets)
    assert len(by_decode) < sum(len(frame.items) for frame in by_decode) / 2
