"""What param-servers and cache nodes do under load: real ones in processes of their own, and simulated ones."""

from loadtest.param_servers.cache_reads import cache_reads
from loadtest.param_servers.figures import Latencies
from loadtest.param_servers.real import block_fetches, hot_matrix, hot_model, start_in_int8
from loadtest.param_servers.simulated import simulated_hot_matrix, simulated_hot_model

__all__ = [
    "Latencies",
    "block_fetches",
    "cache_reads",
    "hot_matrix",
    "hot_model",
    "simulated_hot_matrix",
    "simulated_hot_model",
    "start_in_int8",
]
