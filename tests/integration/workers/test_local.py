"""A decode worker that reads a prompt itself answers as the two legs do, and from its cache what either has left."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import replace

import pytest

from pdbus.context import RequestContext
from pdbus.engine.invalidations import drop_pages
from pdbus.engine.rates import Rates
from pdbus.errors import Conflict, DeadlineExceeded, InvalidRequest, RootGone
from pdbus.kv.format import KvDtype
from pdbus.messages.common import Sampling
from pdbus.messages.router import TokenItem
from pdbus.messages.workers import Resend
from pdbus.model.backend import Model
from pdbus.model.backends import Precision
from pdbus.native.build import levels
from pdbus.subjects import DECODE_RESEND
from tests.support.asking import ids, refused, until
from tests.support.handover import Hand, reserve, reserve_of
from tests.support.llama import Runner
from tests.support.ring import Ring, fleet_of
from tests.support.workers import LocalSource, NewBus, Rig, paused, prompt_of, rig

SAMPLED = Sampling(temperature=1.2, top_p=0.95, repetition_penalty=1.1, frequency_penalty=0.2, presence_penalty=0.1)


async def test_an_answer_equals_the_model_alone(workers: Rig, model: Model) -> None:
    prompt = prompt_of(70)
    ticket = workers.router.ticket(prompt, 12)
    items = await workers.router.answer_local(ticket)
    assert ids(items) == Runner(model).greedy(prompt, 12)
    assert [item.finish for item in items] == [None] * 11 + ["length"]
    assert [item.index for item in items] == list(range(12))
    assert {item.root for item in items} == {ticket.root}
    assert [item.cached_tokens for item in items] == [0] + [None] * 11
    assert not workers.prefill.jobs


async def test_prompts_and_answers_in_one_worker_change_nothing_in_each_other(workers: Rig, model: Model) -> None:
    router = workers.router
    prompts = [prompt_of(length, seed) for seed, length in enumerate((1, 15, 16, 17, 31, 64, 100, 150))]
    asked = [
        (router.answer if at % 3 == 0 else router.answer_local)(router.ticket(prompt, 10))
        for at, prompt in enumerate(prompts)
    ]
    assert [ids(items) for items in await asyncio.gather(*asked)] == [Runner(model).greedy(p, 10) for p in prompts]


async def test_the_same_seed_gives_the_same_text_whoever_reads_and_whatever_was_delivered(workers: Rig) -> None:
    router = workers.router
    ticket = router.ticket(prompt_of(40), 12, sampling=SAMPLED, seed=1234)
    whole = ids(await router.answer(ticket))
    for delivered in (0, 1, 5, 11):
        later = replace(
            ticket, request_id=f"{ticket.request_id}-{delivered}", attempt=2, delivered=tuple(whole[:delivered])
        )
        items = await router.answer_local(later)
        assert [item.index for item in items] == list(range(delivered, 12))
        assert ids(items) == whole[delivered:]


@pytest.mark.parametrize(("max_tokens", "prompt_logprobs"), [(1, None), (1, 0), (0, 2), (5, 2)])
async def test_short_answers_and_log_probabilities_are_those_of_two_legs(
    workers: Rig, max_tokens: int, prompt_logprobs: int | None
) -> None:
    router, prompt = workers.router, prompt_of(50)
    await router.answer_local(router.ticket(prompt, 1))  # where log-probabilities are asked for it must not be used
    wanted = Sampling(temperature=0.0, logprobs=2)
    fields = {"sampling": wanted, "prompt_logprobs": prompt_logprobs}
    apart = await router.answer(router.ticket(prompt, max_tokens, **fields))
    alone = await router.answer_local(router.ticket(prompt, max_tokens, **fields))
    assert [item.finish for item in alone][-1] == "length"
    assert ids(alone) == ids(apart)
    assert _logprobs(alone) == pytest.approx(_logprobs(apart), abs=1e-3)
    assert len(alone[0].prompt_logprobs or ()) == (0 if prompt_logprobs is None else 49)
    assert all(item.prompt_logprobs is None and item.cached_tokens is None for item in alone[1:])
    assert alone[0].cached_tokens == (48 if prompt_logprobs is None else 0)


def _logprobs(items: list[TokenItem]) -> list[float]:
    return [one.logprob for item in items for one in (*(item.prompt_logprobs or ()), *item.logprobs)]


async def test_a_stop_id_ends_the_answer(workers: Rig, model: Model) -> None:
    prompt = prompt_of(30, seed=3)
    stop = Runner(model).greedy(prompt, 1)[0]
    (item,) = await workers.router.answer_local(workers.router.ticket(prompt, 8, stop_ids=(stop,)))
    assert (item.ids, item.finish, item.cached_tokens) == ((), "stop", 0)


@pytest.mark.parametrize("handed_over", [True, False])
async def test_the_next_turn_finds_the_prompt_and_the_answer_of_the_last(
    workers: Rig, model: Model, handed_over: bool
) -> None:
    router, prompt = workers.router, prompt_of(40)
    first = router.ticket(prompt, 30)
    answer = ids(await (router.answer(first) if handed_over else router.answer_local(first)))
    following = [*prompt, *answer, *prompt_of(20, seed=8)]
    items = await router.answer_local(router.ticket(following, 8))
    assert items[0].cached_tokens == 64  # of 70, less the token whose KV nothing has computed
    assert ids(items) == Runner(model).greedy(following, 8)
    other_tenant, other_root = {"salt": b"other"}, {"root": workers.source.root_of["b"]}
    for fields in (other_tenant, other_root):
        items = await router.answer_local(router.ticket(following, 1, **fields))
        assert items[0].cached_tokens == 0


async def test_log_probabilities_of_a_prompt_fill_no_cache(workers: Rig) -> None:
    router, prompt = workers.router, prompt_of(40)
    await router.answer_local(router.ticket(prompt, 20, prompt_logprobs=0))
    await router.answer(router.ticket(prompt, 20, prompt_logprobs=0))
    assert workers.decode.core.pages.cached == 0


@pytest.mark.parametrize("alike", [True, False])
async def test_pages_of_another_compute_class_are_used_and_not_shared(workers: Rig, model: Model, alike: bool) -> None:
    ticket = workers.router.ticket(prompt_of(40), 30)
    own = workers.decode.versions.compute_class
    await reserve(workers, reserve_of(workers, ticket, compute_class=own if alike else f"{own}-other"))
    await workers.router.run_decode(ticket)
    await Hand(workers, ticket, model).send()
    assert len(ids(await workers.router.rest(ticket, first=1))) == 29
    await until(lambda: not workers.decode.jobs)
    assert workers.decode.core.pages.cached == (4 if alike else 0)


async def test_kv_of_other_tokens_than_the_routers_is_refused(workers: Rig, model: Model) -> None:
    """It would be found under the wrong keys."""
    ticket = workers.router.ticket(prompt_of(20))
    await reserve(workers, reserve_of(workers, ticket))
    await Hand(workers, ticket, model).send()
    other = replace(ticket, prompt=tuple(prompt_of(20, seed=5)))
    await workers.router.run_decode(other)
    assert isinstance(await refused(workers.router.rest(other)), Conflict)
    assert workers.decode.core.pages.cached == 0


async def test_a_prefix_from_the_cache_nodes_changes_nothing_but_the_work(workers: Rig, model: Model) -> None:
    router, prompt, ring = workers.router, prompt_of(90), Ring()
    tier, versions, core = workers.decode.l2, workers.decode.versions, workers.decode.core
    tier._ring = tier._write_back._ring = ring  # type: ignore[assignment]
    tier._fleet = fleet_of(1)
    await router.answer_local(router.ticket(prompt, 1))
    await until(lambda: ring.puts == 5)
    await drop_pages(router.root, versions, core)
    tier.rates = Rates(core.pool.format.page_bytes, 16)  # a tiny model is faster than any tier
    items = await router.answer_local(router.ticket(prompt, 8))
    assert items[0].cached_tokens == 80
    assert ids(items) == Runner(model).greedy(prompt, 8)


@pytest.mark.parametrize("handed_over", [True, False])
@pytest.mark.parametrize("later_handed_over", [True, False])
async def test_what_another_attempt_needs_of_a_long_answer_comes_from_its_snapshot(
    workers: Rig, model: Model, handed_over: bool, later_handed_over: bool
) -> None:
    """Whatever worker reads it, though the engine was never idle while it was written."""
    router, prompt, ring = workers.router, prompt_of(40), Ring()
    everyone = (workers.prefill, workers.decode)
    for worker in everyone:
        worker.l2._ring = worker.l2._write_back._ring = ring  # type: ignore[assignment]
        worker.l2._fleet = fleet_of(1)
    workers.decode.snapshot_tokens = 50
    ticket = router.ticket(prompt, 150)
    await (router.start(ticket) if handed_over else router.run_local(ticket))
    text = ids(await router.rest(ticket))
    await until(lambda: len(ring.entries) >= (40 + 100 - 1) // 16)
    for worker in everyone:
        await drop_pages(router.root, worker.versions, worker.core)
        worker.l2.rates = Rates(worker.core.pool.format.page_bytes, 16)  # a tiny model is faster than any tier
    later = replace(ticket, request_id=f"{ticket.request_id}-later", attempt=2, delivered=tuple(text[:120]))
    items = await (router.answer(later) if later_handed_over else router.answer_local(later))
    assert items[0].cached_tokens == 40, "all of the prompt, and what it tells of is the prompt"
    assert text[:120] + ids(items) == text == Runner(model).greedy(prompt, 150)


async def test_a_version_that_is_deleted_meanwhile_leaves_nothing(workers: Rig) -> None:
    router, decode = workers.router, workers.decode
    ticket = router.ticket(prompt_of(40), 200)
    await router.run_local(ticket)
    await router.until(lambda: len(router.of(ticket)) > 20)
    await drop_pages(router.root, decode.versions, decode.core)
    assert len(ids(await router.rest(ticket))) == 200
    await until(lambda: not decode.jobs)
    assert decode.core.pages.cached == 0


async def test_a_run_is_taken_once_and_what_it_sent_is_sent_again(workers: Rig, model: Model) -> None:
    router = workers.router
    ticket = router.ticket(prompt_of(50), 6)
    await asyncio.gather(*(router.run_local(ticket) for _ in range(8)))
    items = await router.rest(ticket)
    assert ids(items) == Runner(model).greedy(list(ticket.prompt), 6)
    await router.run_local(ticket)
    to = DECODE_RESEND(worker=router.decode)
    reply = await router.bus.call(to, Resend(ticket.request_id, 0, 1, 2), RequestContext.after(30))
    assert list(reply.items) == items[2:]
    assert len([item for item in router.items if item.request_id == ticket.request_id]) == 6


async def test_the_two_ways_of_one_attempt_exclude_each_other(workers: Rig, model: Model) -> None:
    router = workers.router
    ticket = router.ticket(prompt_of(50))
    await router.run_decode(ticket)
    assert isinstance(await refused(router.run_local(ticket)), Conflict)
    other = router.ticket(prompt_of(400, seed=2), 20)
    with paused(workers.decode):
        await router.run_local(other)
        assert isinstance(await refused(router.run_decode(other)), Conflict)
        assert isinstance(await refused(reserve(workers, reserve_of(workers, other))), Conflict)
    assert ids(await router.rest(other)) == Runner(model).greedy(list(other.prompt), 20)
    await router.run_prefill(ticket)
    assert ids(await router.rest(ticket)) == Runner(model).greedy(list(ticket.prompt), 8)


@pytest.mark.parametrize(
    ("wrong", "error"),
    [
        ({"prompt": ()}, InvalidRequest),
        ({"prompt": (5, 320)}, InvalidRequest),
        ({"root": bytes(32)}, RootGone),
        ({"deadline_ns": 0}, DeadlineExceeded),
        ({"max_tokens": 0}, InvalidRequest),
    ],
    ids=str,
)
async def test_a_ticket_that_can_not_be_served_is_refused_at_once(
    workers: Rig, wrong: dict[str, object], error: type[Exception]
) -> None:
    ticket = replace(workers.router.ticket(prompt_of(20)), **wrong)  # type: ignore[arg-type]
    assert isinstance(await refused(workers.router.run_local(ticket)), error)


@pytest.mark.skipif(not levels(), reason="no kernels for this processor")
@pytest.mark.parametrize(("precision", "kv_dtype"), [("int8", "int8"), ("int4", "fp16")])
async def test_read_here_or_handed_over_or_cached_the_numbers_are_the_same_to_the_bit(
    twin: NewBus, source: LocalSource, unique: Callable[[str], str], precision: Precision, kv_dtype: KvDtype
) -> None:
    wanted = Sampling(temperature=0.0, logprobs=2)
    async with rig(
        twin, source, name=unique("tiny"), engine="native", precision=precision, kv_dtype=kv_dtype
    ) as workers:
        router = workers.router
        for length in (3, 40, 90):
            prompt = prompt_of(length, seed=length)
            asked = lambda prompt=prompt, salt=b"": router.ticket(prompt, 12, sampling=wanted, salt=salt)  # noqa: E731
            apart, alone = await asyncio.gather(router.answer(asked()), router.answer_local(asked(salt=b"x")))
            cached = await router.answer_local(asked())
            assert cached[0].cached_tokens == (length - 1) // 16 * 16
            for other in (alone, cached):
                assert ids(other) == ids(apart)
                assert [item.logprobs for item in other] == [item.logprobs for item in apart]
        await workers.until_idle()
