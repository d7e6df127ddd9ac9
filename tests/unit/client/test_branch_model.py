"""Writers, seals, transactions and deaths of sealers in any interleaving: nothing is lost, nothing applied twice.

Each of them is a task that stops before and after every operation on a log; the model lets one of them go on at a time,
or kills it where it stands.
"""

from __future__ import annotations

import asyncio
from contextlib import suppress
from typing import Any

import numpy as np
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from pdbus.client.weights.branch import Branch
from pdbus.client.weights.terms import Terms
from pdbus.context import Deadline, new_id
from pdbus.errors import Conflict, NotFound, Overloaded
from pdbus.weights.blocks import block_count
from pdbus.weights.branch import Change
from pdbus.weights.layer import Tensor
from tests.support.branch_world import NAME, ROOM, Life, World

SIZE = 4
TENSOR = Tensor(NAME, "fp32", (SIZE,), (b"",) * block_count((SIZE,), "fp32"))
AT = st.integers(0, SIZE - 1)
VALUES = st.integers(1, 9).map(float)


class Branches(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.loop = asyncio.new_event_loop()
        self.world = World(SIZE)
        self.tasks: dict[asyncio.Task[Any], str] = {}
        self.acked: list[int] = []
        self.transactions: dict[str, tuple[int, float]] = {}

    def teardown(self) -> None:
        self.world.gate.open = True
        for _, future in self.world.gate.waiting:
            if not future.done():
                future.set_result(None)
        self.settle()
        left = [task for task in self.tasks if not task.done()]
        if left:
            self.loop.run_until_complete(asyncio.wait(left))
        for task in self.tasks:
            assert task.cancelled() or task.exception() is None, task
        self.check()
        self.whole()
        self.loop.close()

    def branch(self) -> Branch:
        return Branch(Life(self.world), self.world.bus, "m", "b")  # type: ignore[arg-type]

    def start(self, kind: str, work: Any) -> None:
        async def run() -> None:
            try:
                result = await work
                if kind == "push":
                    self.acked.append(result)
            except (Conflict, NotFound, Overloaded):
                return

        self.tasks[self.loop.create_task(run())] = kind
        self.settle()

    def settle(self) -> None:
        for _ in range(12):
            self.loop.run_until_complete(asyncio.sleep(0))

    @precondition(lambda self: len(self.world.gate.waiting) < 4)
    @rule(at=AT, value=VALUES, adds=st.booleans(), at_once=st.booleans())
    def push(self, at: int, value: float, adds: bool, at_once: bool) -> None:
        branch = self.branch()
        self.world.gate.open = at_once
        self.start("push", (branch.add if adds else branch.push)(NAME, [value], elements=[at]))
        self.world.gate.open = False

    @precondition(lambda self: sum(kind == "seal" and not task.done() for task, kind in self.tasks.items()) < 2)
    @rule()
    def seal(self) -> None:
        self.start("seal", self.branch().seal(author="me"))

    @precondition(lambda self: len(self.world.gate.waiting) < 4)
    @rule(at=AT, value=VALUES)
    def transaction(self, at: int, value: float) -> None:
        async def commit() -> None:
            terms = Terms(new_id(), "stable", "", "me")
            self.transactions[terms.tx] = (at, value)
            async with await Life(self.world).update(terms, Deadline.after(60)) as update:
                blocks = await update.block_arrays(NAME, [0])
                blocks[0][at] = value
                await update.stage_blocks(NAME, blocks)
                await update.commit()

        self.start("transaction", commit())

    @rule(pick=st.integers(0, 5), steps=st.sampled_from([1, 2, 4, 7, 9, 11, 13, 30]))
    def go_on(self, pick: int, steps: int) -> None:
        """One of them, for some steps."""
        if not self.world.gate.waiting:
            return
        chosen = self.world.gate.waiting[pick % len(self.world.gate.waiting)][0]
        for _ in range(steps):
            found = [one for one in self.world.gate.waiting if one[0] is chosen]
            if not found:
                return
            self.world.gate.waiting.remove(found[0])
            found[0][1].set_result(None)
            self.settle()

    @rule(pick=st.integers(0, 5))
    def kill_a_sealer(self, pick: int) -> None:
        sealers = [one for one in self.world.gate.waiting if self.tasks.get(one[0]) == "seal"]
        if sealers:
            task, future = sealers[pick % len(sealers)]
            self.world.gate.waiting.remove((task, future))
            task.cancel()
            self.settle()

    @rule()
    def lose_an_answer(self) -> None:
        self.world.logs.lose_answers = 1

    @invariant()
    def check(self) -> None:
        """Each version is its parent and exactly the stretch that it names; stretches follow each other."""
        upto = 0
        for _, entry in self.world.logs.read(self.world.log)[1:]:
            commit = entry.commit
            assert commit
            expected = self.world.arrays[commit.parent].copy()
            if commit.sealed is None:
                at, value = self.transactions[commit.tx]
                expected[at] = value
            else:
                assert commit.sealed.after == upto
                upto = commit.sealed.upto
                for seq in sorted(self.world.logs.taken):
                    if commit.sealed.after < seq <= upto:
                        Change(self.world.logs.taken[seq], TENSOR).apply({0: expected})
            assert np.array_equal(self.world.arrays[commit.root], expected)
        kept = {seq for seq, _ in self.world.pushed()}
        assert {seq for seq in self.world.logs.taken if seq > upto} <= kept
        assert len(kept) <= ROOM

    def whole(self) -> None:
        """At the end one more seal takes all that is left: every acknowledged push has then counted once."""
        assert set(self.acked) <= self.world.logs.taken.keys()
        assert len(self.acked) == len(set(self.acked))
        work = self.branch().seal(author="me")
        with suppress(NotFound):
            self.loop.run_until_complete(work)
        self.check()
        assert self.world.history().sealed_upto("b", "born") == max(self.world.logs.taken, default=0)
        assert not self.world.pushed()


TestBranches = Branches.TestCase
TestBranches.settings = settings(max_examples=40, stateful_step_count=50, deadline=None)
