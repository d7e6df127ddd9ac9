"""Open-loop load on a running stack (or any OpenAI-compatible server), with latency percentiles as a table and JSON."""
