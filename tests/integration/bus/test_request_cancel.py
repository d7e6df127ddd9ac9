"""A cancellation is never lost, also when it comes together with the answer."""

from __future__ import annotations

import asyncio

import pytest

from pdbus.bus.nats_client import GuardedClient


async def test_a_cancel_that_comes_with_the_answer_is_heard(nats_url: str) -> None:
    client = GuardedClient(lambda error: None, lambda subject: None)
    await client.dial([nats_url], "test", {})
    try:
        client.listen("cancel.test", lambda _: None)  # it is there, and never answers
        asking = asyncio.create_task(client.request("cancel.test", b"", timeout=30))
        while not client._resp_map:  # noqa: ASYNC110 - what happens inside has no event
            await asyncio.sleep(0)
        next(iter(client._resp_map.values())).set_result("the answer")
        asking.cancel()
        with pytest.raises(asyncio.CancelledError):
            await asking
        assert not client._resp_map
    finally:
        await client.shut()
