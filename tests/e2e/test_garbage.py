"""200 garbage messages on every subject: no service dies of one, nothing leaks, the next request is answered."""

from __future__ import annotations

import nats
import openai
import pytest

from pdbus.bus.bus import connect
from pdbus.bus.presence import Fleet
from pdbus.context import Deadline
from pdbus.subjects import Subject, all_subjects
from tests.support.garbage import garbage
from tests.support.idle import SERVICES, until_idle
from tests.support.stack import Stack

COUNT = 50


async def _addresses(stack: Stack) -> dict[str, str]:
    """A live value for each subject token, so that the garbage reaches a service and not only the broker."""
    async with connect(stack.nats_url, name="test") as bus, Fleet(bus) as fleet:
        await fleet.wait_for(lambda seen: all(seen.live(service) for service in SERVICES), Deadline.after(60))
        cards = {service: fleet.live(service)[0] for service in SERVICES}
    return {
        "model": stack.model,
        "router": cards["router"].id,
        "server": cards["param_server"].id,
        "node": cards["cache"].id,
        "shard": "0",
        "service": "prefill",
        "id": "nobody",
        "session": "0-0",
        "attempt": "1",
        "subject": "somebody-s-features",
        "stream": "1",
        "prefill": cards["prefill"].id,
        "decode": cards["decode"].id,
        "bulk": cards["decode"].bulk,
    }


def _name(subject: Subject, known: dict[str, str]) -> str:
    wanted = [part[1:-1] for part in subject.template.split(".") if part.startswith("{")]
    role = "prefill" if ".prefill." in subject.template else "decode"
    values = {"worker": known[role], "address": known["bulk"], **known}
    return subject.name(**{token: values.get(token, "any") for token in wanted})


@pytest.mark.timeout(300)
async def test_no_service_minds_garbage(stack: Stack, client: openai.OpenAI) -> None:
    before = stack.pids()
    known = await _addresses(stack)
    connection = await nats.connect(stack.nats_url)
    try:
        for subject in all_subjects().values():
            for payload in garbage(subject, COUNT):
                await connection.publish(_name(subject, known), payload, reply=connection.new_inbox())
            await connection.rtt()
    finally:
        await connection.close()

    answer = client.chat.completions.create(
        model=stack.model, messages=[{"role": "user", "content": "Are you still there?"}], max_tokens=8
    )
    assert answer.usage is not None
    assert answer.usage.completion_tokens > 0
    await until_idle(stack.nats_url, within_s=100)
    assert stack.pids() == before
