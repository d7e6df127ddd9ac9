"""A failing node costs a few waits, then one probe a pause."""

from __future__ import annotations

import itertools

from pdbus.caching.circuit import Circuit


def test_it_opens_after_three_failures_in_a_row_and_only_then() -> None:
    circuit = Circuit()
    for _ in range(5):
        circuit.failed(0.0)
        circuit.failed(0.0)
        assert circuit.admits(0.0)
        circuit.succeeded()
    for _ in range(3):
        circuit.failed(0.0)
    assert not circuit.admits(0.0)


def test_an_open_circuit_admits_one_probe_a_pause_and_pauses_grow() -> None:
    circuit = Circuit()
    for _ in range(3):
        circuit.failed(0.0)
    now, probes = 0.0, []
    while now < 60.0:
        if circuit.admits(now):
            assert not circuit.admits(now)
            probes.append(now)
            circuit.failed(now)
        now += 0.1
    pauses = [later - earlier for earlier, later in itertools.pairwise(probes)]
    assert pauses == sorted(pauses)
    assert 10 < pauses[-1] < 16
    assert len(probes) < 10


def test_a_successful_probe_closes_it() -> None:
    circuit = Circuit()
    for _ in range(3):
        circuit.failed(0.0)
    assert circuit.admits(1.0)
    circuit.succeeded()
    assert circuit.admits(1.0)
    assert circuit.admits(1.0)
