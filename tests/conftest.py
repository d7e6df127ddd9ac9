"""Fixtures of all tests."""

from __future__ import annotations

import itertools
from collections.abc import AsyncIterator, Callable

import hypothesis
import pytest
import pytest_asyncio

from pdbus.stack.nats_server import EmbeddedNats, embedded_nats
from tests.support.nats import BusPair, real_pair, twin_pair

# A busy machine is slow, and no failure. The same examples each time: whether a change passes is not left to chance.
# `--hypothesis-profile exploring` draws others, as `make test-all` does.
_BUSY = hypothesis.settings(deadline=None, suppress_health_check=[hypothesis.HealthCheck.too_slow])
hypothesis.settings.register_profile("exploring", _BUSY)
hypothesis.settings.register_profile("pdbus", _BUSY, derandomize=True)
hypothesis.settings.load_profile("pdbus")


@pytest_asyncio.fixture(scope="session", loop_scope="session")
async def nats_server(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[EmbeddedNats]:
    """One real nats-server with JetStream for the whole session; tests keep apart by names (`unique`)."""
    async with embedded_nats(tmp_path_factory.mktemp("nats")) as server:
        yield server


@pytest.fixture
def nats_url(nats_server: EmbeddedNats) -> str:
    return nats_server.url


@pytest.fixture(params=["twin", "real"])
async def bus_pair(request: pytest.FixtureRequest, nats_url: str) -> AsyncIterator[BusPair]:
    """The same behaviour is promised of both: a test that takes this runs twice."""
    async with twin_pair() if request.param == "twin" else real_pair(nats_url) as pair:
        yield pair


@pytest.fixture(scope="session")
def unique() -> Callable[[str], str]:
    """Names that no other test of this session uses: models, workers, ids."""
    numbers = itertools.count(1)
    return lambda stem: f"{stem}-{next(numbers)}"
