from __future__ import annotations

from loadtest.param_servers.simulated import simulated_hot_matrix, simulated_hot_model

SHORT = {"readers": 2, "service_s": 0.02, "duration_s": 0.8}


async def test_two_servers_give_more_of_one_matrix_than_one() -> None:
    assert await simulated_hot_matrix(2, **SHORT) > 1.2 * await simulated_hot_matrix(1, **SHORT)


async def test_a_hot_model_gets_more_from_servers_of_its_own() -> None:
    assert await simulated_hot_model(1, **SHORT) > 1.5 * await simulated_hot_model(0, **SHORT)
