"""How tenants share one worker: who is admitted and read first, whose answers are in a step, who gives way. Pure.

A tenant weighs what it asked for lately: the tokens that were computed for it, fading with a half-life, and those of
its prompts that are yet to be read. Among equal priorities the lightest tenant goes first, with all that it needs: so
what a flood brings waits behind everybody else, who waits for no more than the chunk under way. Who goes on asking gets
heavier; and every eighth turn is in the order of arrival, so that nobody starves.

Who has far more in hand than another floods it (floods.py): a flood gets its slots and pages as anybody, its prompts
come last, and of a step in which there are answers of such others it has what makes that a tenth longer
(engine/pace.py). So they keep their pace, and it has the rest. It reads in short steps as long as others were there
lately: they come at any moment.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from collections.abc import Sequence as Many
from itertools import groupby

from pdbus.engine.sequence import Sequence
from pdbus.floods import FLOOD_TIMES, most_beside
from pdbus.kv.pages import PageTable

HALF_LIFE_S = 10.0
ANSWER_TOKEN = 4.0
"""What a token of an answer weighs, in tokens of a prompt."""
_LATELY_S = 10.0
_IN_ORDER_EVERY = 8


def tenant_of(sequence: Sequence) -> str:
    return sequence.ticket.tenant


class Tenants:
    """Of one scheduler. `slots`: sequences in steps at once."""

    def __init__(self, slots: int) -> None:
        self._slots = slots
        self._done: dict[str, float] = {}
        self._at_s = 0.0
        self._weights: Counter[str] = Counter()
        self._in_order = False
        self._seen_s: dict[str, float] = {}
        """When each had something in hand last."""
        self._in_hand: Counter[str] = Counter()
        self._flooding: set[str] = set()

    def look(self, sequences: Iterable[Sequence], turn: int, now_s: float) -> None:
        """A turn begins, with these."""
        left, self._at_s = 0.5 ** (max(now_s - self._at_s, 0.0) / HALF_LIFE_S), now_s
        self._done = {tenant: done * left for tenant, done in self._done.items() if done * left > 1}
        self._weights, self._in_hand = Counter(self._done), Counter()
        for one in sequences:
            self._in_hand[tenant_of(one)] += 1
            self._weights[tenant_of(one)] += one.remaining if one.remaining > 1 else 0
        self._seen_s = {tenant: at_s for tenant, at_s in self._seen_s.items() if now_s - at_s <= _LATELY_S}
        self._seen_s |= dict.fromkeys(self._in_hand, now_s)
        self._flooding = self._far_above(self._in_hand)
        self._in_order = turn % _IN_ORDER_EVERY == 0

    def computed(self, sequence: Sequence, tokens: int) -> None:
        tenant = tenant_of(sequence)
        self._done[tenant] = self._done.get(tenant, 0.0) + (tokens if tokens > 1 else ANSWER_TOKEN)

    def first(self, sequences: Iterable[Sequence]) -> list[Sequence]:
        """In the order in which they should be seen to; as they come where nothing tells them apart. Of a priority,
        interrupted answers before all else: they had their turn."""
        if self._in_order:
            return sorted(sequences, key=lambda one: not one.interrupted)
        ranked = sorted(sequences, key=self._rank)
        return sorted(ranked, key=lambda one: (-one.ticket.priority, not one.interrupted))

    def grouped(self, sequences: Iterable[Sequence]) -> Iterator[list[Sequence]]:
        """The same, those of one tenant and priority together; each group is seen to before the next."""
        for _, group in groupby(self.first(sequences), lambda one: self._in_order or self._rank(one)):
            yield list(group)

    def may_start(self, sequence: Sequence, running: Many[Sequence]) -> bool:
        """There is a slot, of which there are twice as many for interrupted answers; or its tenant has less than its
        share of them."""
        if len(running) < self._slots * (2 if sequence.interrupted else 1):
            return True
        held = Counter(map(tenant_of, running))
        tenant = tenant_of(sequence)
        return held[tenant] * len(held.keys() | {tenant}) < self._slots

    def no_heavier(self, group: Many[Sequence], answers: Iterable[Sequence]) -> int:
        """How many of the answers are to be spared by prompts of this group: those of its own tenants and of lighter
        ones."""
        own = {tenant_of(one) for one in group}
        most = max(self._weights[tenant] for tenant in own)
        return sum(tenant_of(one) in own or self._weights[tenant_of(one)] <= most for one in answers)

    def brief(self, group: Many[Sequence]) -> bool:
        """Whether its prompts are to be read in short steps: a far lighter tenant, who waits for no more than the step
        under way, was there lately, or waits for what caches have of its prompt."""
        own = set(map(tenant_of, group))
        lightest = min(self._weights[tenant] for tenant in self._seen_s)
        heavy = max(self._weights[tenant] for tenant in own) > FLOOD_TIMES * lightest
        return heavy or not own.isdisjoint(self._far_above(self._seen_s))

    def adding(self, answers: Iterable[Sequence]) -> Callable[[Sequence], bool]:
        """Tells who only adds to a step with these answers: of a tenant that floods those of some, unless it is of a
        higher priority than all of them."""
        answers = [one for one in answers if not one.handoff]
        floods = self._far_above(map(tenant_of, answers))
        most = max((one.ticket.priority for one in answers if tenant_of(one) not in floods), default=0)
        return lambda one: tenant_of(one) in floods and one.ticket.priority <= most

    def _far_above(self, tenants: Iterable[str]) -> set[str]:
        least = min((self._in_hand[tenant] for tenant in tenants), default=self._in_hand.total())
        return {tenant for tenant, count in self._in_hand.items() if count > most_beside(least)}

    def in_step(self, answers: list[Sequence], most: int) -> list[Sequence]:
        """As `shared`, where they are of several tenants: one tenant's answers slow nobody else down."""
        return self.shared(answers, most) if len(set(map(tenant_of, answers))) > 1 else answers

    def shared(self, answers: list[Sequence], most: int) -> list[Sequence]:
        """At most so many of them: each tenant's share, those first that were left out longest."""
        by_tenant: dict[str, list[Sequence]] = {}
        for one in answers:
            by_tenant.setdefault(tenant_of(one), []).append(one)
        if len(answers) <= most:
            return answers
        chosen: list[Sequence] = []
        for number, own in enumerate(sorted(by_tenant.values(), key=len)):
            share = max((most - len(chosen)) // (len(by_tenant) - number), 1)
            chosen += sorted(own, key=lambda one: one.served)[:share]
        return chosen

    def gives_way(self, able: Many[Sequence], held: Mapping[str, int]) -> Sequence:
        """Of the lowest priority the youngest of the tenant that holds most pages; `able`: in order of admission, at
        least one."""
        least = min(one.ticket.priority for one in able)
        able = [one for one in able if one.ticket.priority == least]
        most = max(held.get(tenant_of(one), 0) for one in able)
        return next(one for one in reversed(able) if held.get(tenant_of(one), 0) == most)

    def below_share(self, tenant: str, wanted: int, pages: PageTable) -> bool:
        """With so many more pages it has no more than its part of all of them, and others are there to take from."""
        tenants = len(pages.held.keys() | {tenant})
        return tenants > 1 and (pages.held.get(tenant, 0) + wanted) * tenants <= pages.total

    def _rank(self, sequence: Sequence) -> tuple[int, bool, float, str]:
        tenant = tenant_of(sequence)
        return -sequence.ticket.priority, tenant in self._flooding, self._weights[tenant], tenant
