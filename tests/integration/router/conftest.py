"""The routers of these tests, and who asks them."""

from __future__ import annotations

from collections.abc import AsyncIterator

import aiohttp
import openai
import pytest

from tests.support.router_rig import Rig, rig


@pytest.fixture
async def http() -> AsyncIterator[aiohttp.ClientSession]:
    async with aiohttp.ClientSession() as session:
        yield session


@pytest.fixture
async def r(request: pytest.FixtureRequest) -> AsyncIterator[Rig]:
    """With as many versions as the test's module says by VERSIONS; idle again in the end."""
    async with rig(versions=getattr(request.module, "VERSIONS", 1)) as made:
        yield made
        await made.until_idle()


@pytest.fixture
async def client(r: Rig) -> AsyncIterator[openai.AsyncOpenAI]:
    """The official one, which tries nothing again."""
    async with openai.AsyncOpenAI(base_url=r.url + "/v1", api_key="any", max_retries=0) as made:
        yield made
