"""A prefill worker's part of a hand-over, made by hand: every part of it can be wrong."""

from __future__ import annotations

import zlib
from dataclasses import replace

from pdbus.bus.codec import encode
from pdbus.context import Deadline, RequestContext
from pdbus.kv.codec import export_layer
from pdbus.kv.prefix import tokens_digest
from pdbus.messages.bulk import KV_FINAL, KvHead
from pdbus.messages.common import Ticket
from pdbus.messages.decode import KvFinal, Lease, Reserve
from pdbus.messages.router import TokenItem
from pdbus.model.backend import Model
from pdbus.subjects import DECODE_RESERVE, KV
from tests.support.llama import Runner
from tests.support.workers import Rig


def reserve_of(workers: Rig, ticket: Ticket, **changed: object) -> Reserve:
    reserve = Reserve(
        ticket.request_id,
        ticket.choice,
        ticket.attempt,
        ticket.router,
        ticket.root,
        len(ticket.tokens),
        workers.router.prefill,
        str(workers.decode.pool.format),
        "any",
        ticket.deadline_ns,
    )
    return replace(reserve, **changed)  # type: ignore[arg-type]


async def reserve(workers: Rig, message: Reserve) -> Lease:
    to = DECODE_RESERVE(worker=workers.router.decode)
    return await workers.router.bus.call(to, message, RequestContext.after(30))


class Hand:
    """A prefill worker's hand-over, made by hand: every part of it can be wrong."""

    def __init__(self, workers: Rig, ticket: Ticket, model: Model) -> None:
        self.workers, self.ticket = workers, ticket
        runner = Runner(model)
        logits = runner.logits(list(ticket.tokens))[-1]
        pages = runner.page_ids[: workers.decode.pool.format.pages_for(len(ticket.tokens))]
        self.bodies = [bytes(export_layer(runner.pool, layer, pages)) for layer in range(model.config.layers)]
        tokens = len(ticket.tokens)
        self.heads = [KvHead(ticket.attempt, ticket.root, at, 0, tokens) for at in range(model.config.layers)]
        first = TokenItem(
            ticket.request_id,
            ticket.choice,
            ticket.attempt,
            ticket.root,
            len(ticket.delivered),
            (int(logits.argmax()),),
        )
        checksum = 0
        for body in self.bodies:
            checksum = zlib.crc32(body, checksum)
        digest = tokens_digest(ticket.tokens)
        self.final = KvFinal(ticket.attempt, ticket.root, tokens, digest, len(self.bodies), checksum, first)

    @property
    def subject(self) -> str:
        worker, ticket = self.workers.router.decode, self.ticket
        return KV.name(worker=worker, session=ticket.session, attempt=str(ticket.attempt))

    async def send(self) -> None:
        async with self.workers.router.bus.bulk.send(self.subject, Deadline.after(30)) as out:
            for head, body in zip(self.heads, self.bodies, strict=True):
                await out.item(head, body)
            head = KvHead(self.final.attempt, self.final.root, KV_FINAL, self.final.tokens, 0)
            await out.item(head, encode(self.final))
