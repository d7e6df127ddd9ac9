"""Goal 6, its other half: a hot matrix over several param-servers, a hot model with a group of its own, and int8 made
once at the servers."""

from __future__ import annotations

from loadtest.goals import Row, beside
from loadtest.param_servers import hot_matrix, hot_model, simulated_hot_matrix, simulated_hot_model, start_in_int8
from loadtest.weights.terms import Terms

_SIMULATED = "servers that take 20 ms a block, on the bus's twin: no core is the limit"


async def measure(terms: Terms) -> list[Row]:
    seconds = 2.0 if terms.short else 5.0
    real = f"{seconds:g} s, real servers: all processes share the cores of one machine"
    matrix = [await hot_matrix(servers, duration_s=seconds) for servers in (1, 2)]
    model = [await hot_model(own, duration_s=seconds) for own in (False, True)]
    far_matrix = [await simulated_hot_matrix(servers, duration_s=seconds) for servers in (1, 2, 4)]
    far_model = [await simulated_hot_model(own, duration_s=seconds) for own in (0, 1, 2)]
    start = await start_in_int8(terms.model)
    share = start.int8_bytes / start.fp32_bytes
    times = f"fetched in {start.int8_s:.1f} s against {start.fp32_s:.1f} s; made once in {start.convert_s:.1f} s"
    return [
        beside("a hot matrix over 2 servers against 1", _times(matrix), real),
        beside("a hot model from a process of its own", _times(model), real),
        beside("a hot matrix over 2 and 4 servers against 1", _times(far_matrix), _SIMULATED),
        beside("a hot model with 1 and 2 servers of its own", _times(far_model), f"{_SIMULATED}; else shared by three"),
        beside("a start from int8 made at the servers", f"{share:.0%} of the bytes", times),
    ]


def _times(rates: list[float]) -> str:
    """How many times the first of them the others are."""
    return ", ".join(f"{rate / rates[0]:.2f} ×" for rate in rates[1:])
