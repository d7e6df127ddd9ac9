"""Two versions of a tiny encoder, and a router with workers of it."""

from __future__ import annotations

from collections.abc import AsyncIterator

import aiohttp
import openai
import pytest
import torch

from pdbus.bus.bus import Bus, connect
from pdbus.model.checkpoint import open_checkpoint
from tests.support.encoder_rig import EncoderRig, encoder_rig
from tests.support.encoders import tiny_encoder
from tests.support.router_rig import until
from tests.support.workers import LocalSource


@pytest.fixture(scope="session")
def encoders(tmp_path_factory: pytest.TempPathFactory) -> LocalSource:
    folder = tmp_path_factory.mktemp("encoders")
    return LocalSource(
        {name: open_checkpoint(tiny_encoder(folder / name, seed=seed)) for seed, name in enumerate(("a", "b"), 1)}
    )


@pytest.fixture
async def r(encoders: LocalSource) -> AsyncIterator[EncoderRig]:
    torch.set_num_threads(1)
    async with encoder_rig(encoders) as made:
        yield made
        await made.until_written()
        await until(lambda: not made.router.frontend.admission.running)
        await until(lambda: not any(worker.load().running for worker in made.workers))


@pytest.fixture
async def http(r: EncoderRig) -> AsyncIterator[aiohttp.ClientSession]:
    async with aiohttp.ClientSession(r.url) as session:
        yield session


@pytest.fixture
async def client(r: EncoderRig) -> AsyncIterator[openai.AsyncOpenAI]:
    async with openai.AsyncOpenAI(base_url=r.url + "/v1", api_key="any", max_retries=0) as made:
        yield made


@pytest.fixture
async def real_bus(nats_url: str) -> AsyncIterator[Bus]:
    async with connect(nats_url, name="test") as bus:
        yield bus
