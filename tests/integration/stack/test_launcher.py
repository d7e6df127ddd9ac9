"""The launcher: all start together, the dead come back, and no way of ending leaves a process behind."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable

from pdbus.stack.folder import alive
from tests.integration.stack.conftest import PATIENCE_S, ToyStack, wait_until

Start = Callable[..., ToyStack]


def _all_gone(pids: dict[str, int]) -> bool:
    return not any(map(alive, pids.values()))


def test_the_life_of_a_stack(toy_stack: Start) -> None:
    """Of one, since each costs eight processes: it is alone on its folder, mends itself, leaves nothing when it is
    killed, begins again in the same folder, and ends in order."""
    stack = toy_stack()
    stack.wait_ready()
    assert stack.pids().keys() == {
        "nats", "router-1", "param-server-1", "prefill-1", "decode-1", "cache-1", "invalidator-1",
    }  # fmt: skip
    _a_second_one_is_refused(stack, toy_stack)
    _a_dead_service_comes_back(stack)
    _a_dead_nats_server_comes_back_where_it_was(stack)
    pids = stack.pids()
    stack.process.kill()
    stack.process.wait()
    wait_until(lambda: _all_gone(pids), "every process ended")
    again = toy_stack()
    again.wait_ready()
    _ctrl_c_ends_all_in_order(again)


def _a_second_one_is_refused(stack: ToyStack, toy_stack: Start) -> None:
    second = toy_stack()
    assert second.process.wait(PATIENCE_S) == 1
    assert f"pid {stack.process.pid}" in second.text
    assert stack.process.poll() is None
    assert stack.run["ready"]


def _a_dead_service_comes_back(stack: ToyStack) -> None:
    before, url = stack.pids(), stack.run["url"]
    for id in ("decode-1", "router-1"):
        os.kill(before[id], signal.SIGKILL)
    for id in ("decode-1", "router-1"):
        wait_until(lambda id=id: stack.pids()[id] != before[id], f"{id} is started again")
        wait_until(lambda id=id: stack.text.count(f"ready  {id}") == 2, f"{id} is ready again")
        assert f"ended  {id}" in stack.text
    assert "killed by SIGKILL" in stack.text
    assert stack.run["url"] == url, "a router that took a free port keeps it"


def _a_dead_nats_server_comes_back_where_it_was(stack: ToyStack) -> None:
    before = stack.run
    os.kill(before["pids"]["nats"], signal.SIGKILL)
    wait_until(lambda: stack.pids()["nats"] != before["pids"]["nats"], "nats is started again")
    assert stack.run["nats_url"] == before["nats_url"]
    os.kill(before["pids"]["cache-1"], signal.SIGKILL)  # its new life has to be heard over the new server
    wait_until(lambda: stack.text.count("ready  cache-1") == 2, "the launcher hears presence again")


def _ctrl_c_ends_all_in_order(stack: ToyStack) -> None:
    pids, said = stack.pids(), len(stack.text)
    stack.process.send_signal(signal.SIGINT)
    assert stack.process.wait(PATIENCE_S) == 0
    assert _all_gone(pids)
    assert stack.run == {}
    for id in pids.keys() - {"nats"}:
        steps = [line for line in stack.log(id) if line.startswith("toy:")]
        assert steps[-4:] == ["toy: card draining", "toy: stop_intake", "toy: drain", "toy: close"], id
    assert "all stopped" in stack.text[said:]
    assert "Traceback" not in stack.text


def test_a_launcher_that_is_killed_while_it_starts_leaves_nothing(toy_stack: Start) -> None:
    stack = toy_stack("decode=slow_start")
    pids = _all_started(stack)
    stack.process.kill()
    stack.process.wait()
    wait_until(lambda: _all_gone(pids), "every process ended")


def _all_started(stack: ToyStack) -> dict[str, int]:
    return wait_until(lambda: pids if len(pids := stack.run.get("pids", {})) == 7 else None, "all started")  # type: ignore[no-any-return]


def test_a_service_that_can_not_start_fails_the_start_with_its_last_words(toy_stack: Start) -> None:
    stack = toy_stack("decode=bad_start")
    pids = _all_started(stack)
    assert stack.process.wait(PATIENCE_S) == 1
    assert "this toy is broken" in stack.text
    assert "decode-1 does not start" in stack.text
    wait_until(lambda: _all_gone(pids), "every process ended")


def test_ctrl_c_while_starting_ends_it_quietly(toy_stack: Start) -> None:
    stack = toy_stack("decode=slow_start")
    wait_until(lambda: "ready  router-1" in stack.text, "others are ready")
    pids = stack.pids()
    stack.process.send_signal(signal.SIGINT)
    assert stack.process.wait(PATIENCE_S) == 0
    assert _all_gone(pids)
    assert "Traceback" not in stack.text


def test_a_second_ctrl_c_does_not_wait_for_running_work(toy_stack: Start) -> None:
    stack = toy_stack("prefill=slow_drain", PDBUS_DRAIN_S="600")
    stack.wait_ready()
    pids = stack.pids()
    stack.process.send_signal(signal.SIGINT)
    wait_until(lambda: "toy: drain" in stack.log("prefill-1"), "it drains")
    stack.process.send_signal(signal.SIGINT)
    assert stack.process.wait(PATIENCE_S) == 0
    assert _all_gone(pids)
