"""The bus. `bus.py` holds what services use: `connect()` or `memory_bus()` make a `Bus`; its `bulk` is in bulk.py, its
`logs` in logs.py, presence and the fleet's table in presence.py. Below them: codec, headers, and the two transports."""
