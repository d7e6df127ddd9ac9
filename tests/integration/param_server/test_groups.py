"""Several models on one bus: servers that they share, and servers of its own for one of them."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AsyncExitStack
from pathlib import Path

import numpy as np
import pytest

from pdbus.bus.bus import connect
from pdbus.bus.presence import Fleet
from pdbus.context import Deadline, RequestContext
from pdbus.model.checkpoint import open_checkpoint
from pdbus.param_server.group import ParamServers, settings_of
from pdbus.param_server.settings import ParamServerSettings
from pdbus.peers.history import HistoryFollower
from pdbus.peers.weights import BlockReader
from pdbus.settings import SettingsError
from tests.support import param_servers
from tests.support.checkpoints import tiny_checkpoint


async def test_a_process_holds_the_models_that_it_is_told_to_and_a_group_of_its_own_one_alone(
    nats_url: str, tmp_path: Path, unique: Callable[[str], str]
) -> None:
    hot, cold = unique("hot"), unique("cold")
    checkpoints = {
        hot: tiny_checkpoint(tmp_path / "1", "llama"),
        cold: tiny_checkpoint(tmp_path / "2", "llama", seed=1),
    }
    async with AsyncExitStack() as life:
        for model, checkpoint in checkpoints.items():  # who pushed them, say
            await param_servers.ParamServers(nats_url, model, tmp_path / model, life).start("first", checkpoint)
        bus = await life.enter_async_context(connect(nats_url, name="shared"))
        settings = ParamServerSettings(id=unique("s"), model=cold, data=tmp_path / "s", param_models=(cold, hot))
        fleet = await life.enter_async_context(Fleet(bus))
        shared = await life.enter_async_context(ParamServers(settings, bus))
        own = settings_of(settings, hot).id
        await fleet.wait_for(lambda fleet: fleet.state(own) == "live", Deadline.after(30))
        card = fleet.card(own)
        assert card
        assert (card.model, settings_of(settings, cold)) == (hot, settings)
        assert not shared.failed.is_set()
        for model, members in ((hot, {f"{hot}-first", own}), (cold, {f"{cold}-first", settings.id})):
            follower = await life.enter_async_context(HistoryFollower(bus, model))
            await follower.caught_up(Deadline.after(30))
            assert set(follower.history.members) == members
            root = follower.history.head("stable")
            assert root
            found = await BlockReader(bus, model, follower).tensors(root, RequestContext.after(30))
            expected = dict(open_checkpoint(checkpoints[model]).tensors())
            assert all(np.array_equal(found[name], expected[name]) for name in expected)


async def test_a_checkpoint_of_a_model_that_is_not_served_is_refused(nats_url: str, tmp_path: Path) -> None:
    settings = ParamServerSettings(model="a", data=tmp_path, checkpoint="x", param_models=("b",))
    async with connect(nats_url, name="refused") as bus:
        with pytest.raises(SettingsError, match="PDBUS_PARAM_MODELS"):
            ParamServers(settings, bus)
