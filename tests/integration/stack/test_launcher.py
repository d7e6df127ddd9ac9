"""The launcher: all start together, the dead come back, and no way of ending leaves a process behind."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable

import pytest

from pdbus.stack.folder import alive
from tests.integration.stack.conftest import ToyStack, wait_until

Start = Callable[..., ToyStack]


def _all_gone(pids: dict[str, int]) -> bool:
    return not any(map(alive, pids.values()))


def test_ctrl_c_ends_all_in_order_and_leaves_nothing(toy_stack: Start) -> None:
    stack = toy_stack()
    stack.wait_ready()
    pids = stack.pids()
    assert pids.keys() == {
        "nats", "router-1", "param-server-1", "prefill-1", "decode-1", "cache-1", "invalidator-1",
    }  # fmt: skip
    stack.process.send_signal(signal.SIGINT)
    assert stack.process.wait(30) == 0
    assert _all_gone(pids)
    assert stack.run == {}
    for id in pids.keys() - {"nats"}:
        steps = [line for line in stack.log(id) if line.startswith("toy:")]
        assert steps[-4:] == ["toy: card draining", "toy: stop_intake", "toy: drain", "toy: close"], id
    assert "all stopped" in stack.text
    assert "Traceback" not in stack.text


@pytest.mark.parametrize("when", ["starting", "ready"])
def test_a_killed_launcher_leaves_nothing(toy_stack: Start, when: str) -> None:
    stack = toy_stack("decode=slow_start") if when == "starting" else toy_stack()
    if when == "ready":
        stack.wait_ready()
    pids = wait_until(lambda: stack.run.get("pids", {}) if len(stack.run.get("pids", {})) == 7 else None, "all started")
    stack.process.kill()
    stack.process.wait()
    wait_until(lambda: _all_gone(pids), "every process ended", within_s=30)

    again = toy_stack()  # and its folder is of use again
    again.wait_ready()


def test_a_dead_service_comes_back_and_it_is_said(toy_stack: Start) -> None:
    stack = toy_stack()
    stack.wait_ready()
    before, url = stack.pids(), stack.run["url"]
    for id in ("decode-1", "router-1"):
        os.kill(before[id], signal.SIGKILL)
        wait_until(lambda id=id: stack.pids()[id] != before[id], f"{id} is started again")
        wait_until(lambda id=id: stack.text.count(f"ready  {id}") == 2, f"{id} is ready again")
        assert f"ended  {id}" in stack.text
        assert "killed by SIGKILL" in stack.text
    assert stack.run["url"] == url, "a router that took a free port keeps it"


def test_a_dead_nats_server_comes_back_where_it_was(toy_stack: Start) -> None:
    stack = toy_stack()
    stack.wait_ready()
    before = stack.run
    os.kill(before["pids"]["nats"], signal.SIGKILL)
    wait_until(lambda: stack.pids()["nats"] != before["pids"]["nats"], "nats is started again")
    assert stack.run["nats_url"] == before["nats_url"]
    os.kill(before["pids"]["decode-1"], signal.SIGKILL)  # its new life has to be heard over the new server
    wait_until(lambda: stack.text.count("ready  decode-1") == 2, "the launcher hears presence again")


def test_a_second_launcher_on_the_folder_is_refused_with_the_reason(toy_stack: Start) -> None:
    first = toy_stack()
    first.wait_ready()
    second = toy_stack()
    assert second.process.wait(30) == 1
    assert f"pid {first.process.pid}" in second.text
    assert first.process.poll() is None
    assert first.run["ready"]


def test_a_service_that_can_not_start_fails_the_start_with_its_last_words(toy_stack: Start) -> None:
    stack = toy_stack("decode=bad_start")
    pids = wait_until(lambda: stack.run.get("pids", {}) if len(stack.run.get("pids", {})) == 7 else None, "all started")
    assert stack.process.wait(40) == 1
    assert "this toy is broken" in stack.text
    assert "decode-1 does not start" in stack.text
    wait_until(lambda: _all_gone(pids), "every process ended", within_s=30)


def test_ctrl_c_while_starting_ends_it_quietly(toy_stack: Start) -> None:
    stack = toy_stack("decode=slow_start")
    wait_until(lambda: "ready  router-1" in stack.text, "others are ready")
    pids = stack.pids()
    stack.process.send_signal(signal.SIGINT)
    assert stack.process.wait(30) == 0
    assert _all_gone(pids)
    assert "Traceback" not in stack.text


def test_a_second_ctrl_c_does_not_wait_for_running_work(toy_stack: Start) -> None:
    stack = toy_stack("prefill=slow_drain")
    stack.wait_ready()
    pids = stack.pids()
    stack.process.send_signal(signal.SIGINT)
    wait_until(lambda: "toy: drain" in stack.log("prefill-1"), "it drains")
    stack.process.send_signal(signal.SIGINT)
    assert stack.process.wait(8) == 0, "less than the drain time"
    assert _all_gone(pids)
