"""A request's way through the router, the same for HTTP and for the bus: queue, version, tokens, cache, generation."""

from __future__ import annotations

import random
import secrets
from collections.abc import AsyncIterator
from concurrent.futures import Executor
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass

from pdbus.bus.bus import Bus
from pdbus.caching.result_key import ResultKey
from pdbus.context import RequestContext
from pdbus.messages.common import Digest, Ticket
from pdbus.router.admission import Admission
from pdbus.router.answer import Answer
from pdbus.router.cache_control import CacheControl
from pdbus.router.demand import Demands
from pdbus.router.generation import Generation
from pdbus.router.idempotency import IdempotencyTable, body_of, seed_of
from pdbus.router.identity import OPEN, Identities, Identity
from pdbus.router.metrics import RouterMetrics
from pdbus.router.models import Models
from pdbus.router.openai_schema import GenerateRequest
from pdbus.router.output import ChoiceOutput
from pdbus.router.prompts import Encoded, encode_prompts, most_tokens
from pdbus.router.quotas import Quotas
from pdbus.router.results import Results, key_of
from pdbus.router.sessions import session_of
from pdbus.router.tokens import TokenHub
from pdbus.router.version import Version
from pdbus.telemetry import Phase


@dataclass(frozen=True, slots=True)
class Caller:
    """Who asks, until when, and how."""

    ctx: RequestContext
    """Its request id is the router's own: ids from outside name nothing."""
    cache: CacheControl
    idempotency_key: str | None = None
    session: str | None = None
    """What the caller says that this request belongs to: it is served by one version while canaries run."""
    identity: Identity = OPEN
    """Whose the context's tenant is, and what the key that proved it may do."""


@dataclass(frozen=True, slots=True)
class Plan:
    """A request on its root, ready to be answered."""

    request: GenerateRequest
    caller: Caller
    version: Version
    prompts: tuple[Encoded, ...]
    limits: tuple[int, ...]
    """Most tokens of the answer to each prompt."""
    seed: int
    compute_class: str | None
    """None: no worker serves the root just now."""
    key: ResultKey | None
    """None: the answer can't be asked for again, or the caller wants no cache."""


class Frontend:
    """Used from one event loop."""

    def __init__(
        self,
        bus: Bus,
        router: str,
        models: Models,
        hub: TokenHub,
        results: Results,
        admission: Admission,
        executor: Executor,
        metrics: RouterMetrics,
        identities: Identities,
        quotas: Quotas,
    ) -> None:
        self._identities = identities
        self._quotas = quotas
        self.models = models
        self.admission = admission
        self.metrics = metrics
        self._bus = bus
        self._router = router
        self._hub = hub
        self._results = results
        self._executor = executor
        self.idempotency = IdempotencyTable()
        self._demands = Demands()
        self._rng = random.Random()  # noqa: S311 - spreads load and retries

    def held(self) -> dict[str, int]:
        """As Service.held: requests at work and waiting, choices that a quota counts, idempotency keys in use."""
        running, waiting = self.admission.running, self.admission.waiting
        charged, keys = self._quotas.inflight, self.idempotency.users
        return {"running": running, "waiting": waiting, "charged": charged, "keys_in_use": keys}

    @asynccontextmanager
    async def answer(self, request: GenerateRequest, caller: Caller) -> AsyncIterator[Answer]:
        """Yields the answer once it has begun; to be read by `batches()`. Leaving early cancels it everywhere.

        Raises, also in mid-answer, the errors of errors.py in the caller's terms."""
        deadline = caller.ctx.deadline
        deadline.check("the request was taken")
        self.models.check_name(request.model)
        await self.models.check_ref(request.ref, deadline)
        choices = request.n * max(len(request.prompts), 1)
        async with AsyncExitStack() as stack:
            spending = stack.enter_context(self._quotas.hold(caller.identity, choices))
            with self.metrics.span(Phase.QUEUE):
                if caller.idempotency_key is not None:
                    await stack.enter_async_context(
                        self.idempotency.hold(caller.ctx.tenant, caller.idempotency_key, body_of(request), deadline)
                    )
                await stack.enter_async_context(
                    self.admission.slot(choices, deadline, self._demands.of(request, caller.ctx))
                )
            # again: the ref may have moved while the request waited
            ref = self.models.ref_for(request.ref, session_of(request, caller.ctx.tenant, caller.session))
            served = stack.enter_context(self.metrics.refs.request(self.models.named(ref)))
            root = served.root = self.models.resolve(ref)
            if recorder := self._bus.recorder:
                recorder.put("admit", request=caller.ctx.request_id, root=root, ref=self.models.named(ref))
            answer, plan = await self._prepare(request, caller, root)
            served.answer = answer
            spending.tokens(sum(len(prompt.ids) for prompt in plan.prompts))
            stack.callback(lambda: spending.tokens(answer.completion_tokens))
            stack.callback(lambda: self._demands.answered(caller.ctx.tenant, answer.each_tokens, whole=answer.whole))
            await stack.enter_async_context(answer)
            yield answer
            if recorder := self._bus.recorder:
                told, whole = answer.completion_tokens, answer.whole
                recorder.put("end", request=answer.request_id, root=plan.version.root, tokens=told, whole=whole)
            if answer.cacheable and plan.key and caller.cache.store:
                once = caller.idempotency_key is not None and not request.deterministic
                self._results.put(plan.key, plan.version.root, caller.ctx, answer.outputs, once=once)

    async def _prepare(self, request: GenerateRequest, caller: Caller, root: Digest) -> tuple[Answer, Plan]:
        plan = await self._plan(request, caller, root)
        answer = Answer(caller.ctx.request_id, request, plan.version, plan.prompts, caller.ctx.deadline)
        answer.outputs = [self._output(plan, answer, choice) for choice in range(len(plan.prompts) * request.n)]
        if plan.key and caller.cache.read:
            answer.source = "miss"
            with self.metrics.span("result_cache") as span:
                stored = await self._results.get(
                    plan.key, root, caller.ctx, max_age_s=caller.cache.max_age_s, choices=len(answer.outputs)
                )
                span.set_attribute("pdbus.cache.hit", stored is not None)
            if stored is not None:
                if recorder := self._bus.recorder:
                    recorder.put("hit", request=caller.ctx.request_id, root=root, made=stored.root, key=plan.key.key)
                answer.source = "hit"
                answer.replay(stored)
        self.metrics.result_cache(answer.source)
        if answer.source != "hit":
            answer.generate([self._generation(plan, output) for output in answer.outputs])
        return answer, plan

    async def _plan(self, request: GenerateRequest, caller: Caller, root: Digest) -> Plan:
        with self.metrics.span("tokenize") as span:
            version = await self.models.get(root, caller.ctx.deadline)
            prompts = await encode_prompts(request, version, self._executor)
            span.set_attribute("gen_ai.usage.input_tokens", sum(len(prompt.ids) for prompt in prompts))
        limits = tuple(most_tokens(request, prompt, version) for prompt in prompts)
        given = None if request.seed is None else request.seed % 2**64
        if given is None and caller.idempotency_key is not None and request.temperature != 0:
            given = seed_of(caller.ctx.tenant, caller.idempotency_key)
        kind = self._hub.workers.kind(root)
        key, cached = None, caller.cache.read or caller.cache.store
        if cached and kind is not None and (given is not None or request.deterministic):
            key = key_of(
                request,
                tenant=caller.ctx.tenant,
                salt=self._identities.salt(caller.ctx.tenant),
                root=root,
                compute_class=kind.compute_class,
                tokens=[prompt.ids for prompt in prompts],
                limits=limits,
                seed=given,
            )
        return Plan(
            request,
            caller,
            version,
            prompts,
            limits,
            secrets.randbits(64) if given is None else given,
            kind.compute_class if kind else None,
            key,
        )

    def _output(self, plan: Plan, answer: Answer, choice: int) -> ChoiceOutput:
        request, prompt = plan.request, plan.prompts[choice // plan.request.n]
        text = plan.version.tokenizer.decode(prompt.ids) if request.echo and prompt.text is None else prompt.text
        return ChoiceOutput(
            choice,
            plan.version.tokenizer.bytes,
            answer.emit,
            stops=request.stop,
            stop_ids=frozenset(_stop_ids(plan)),
            most_tokens=plan.limits[choice // request.n],
            logprobs=request.logprobs is not None,
            echo=prompt.ids if request.echo else None,
            echo_text=text or "",
        )

    def _generation(self, plan: Plan, output: ChoiceOutput) -> Generation:
        request, ctx = plan.request, plan.caller.ctx
        prompt = plan.prompts[output.choice // request.n]
        ticket = Ticket(
            request_id=ctx.request_id,
            choice=output.choice,
            attempt=1,
            router=self._router,
            model=self.models.model,
            root=plan.version.root,
            tenant=ctx.tenant,
            salt=self._identities.salt(ctx.tenant),
            prompt=prompt.ids,
            delivered=(),
            sampling=request.sampling,
            seed=plan.seed,
            max_tokens=plan.limits[output.choice // request.n],
            stop_ids=_stop_ids(plan),
            deadline_ns=ctx.deadline.wall_ns,
            prompt_logprobs=request.logprobs if request.echo else None,
            priority=ctx.priority,
        )
        hub, bus, exists = self._hub, self._bus, self.models.exists
        return Generation(ticket, output, plan.version, plan.compute_class, hub, bus, ctx, self._rng, exists)


def _stop_ids(plan: Plan) -> tuple[int, ...]:
    ends = () if plan.request.ignore_eos else plan.version.stop_ids
    return tuple(sorted({*ends, *plan.request.stop_token_ids}))
